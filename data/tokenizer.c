/* See tokenizer.h. Text is cut at the added tokens, what lies between into pieces, and the bytes of each piece are
 * merged. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "tokenizer_parts.h"

/* The ids of one text on their way out. */
typedef struct {
    const Tokenizer *t;
    BpeScratch scratch;
    int32_t *piece; /* owned: ids of the current piece */
    size_t piece_capacity;
    int32_t *ids; /* the caller's */
    int64_t n_ids, max_ids;
} Encoder;

static void put_id(Encoder *e, int32_t id) {
    if (e->n_ids < e->max_ids) e->ids[e->n_ids] = id;
    e->n_ids++;
}

static void encode_piece(Encoder *e, const char *piece, size_t n) {
    if (n > e->piece_capacity) {
        free(e->piece);
        e->piece_capacity = n < 64 ? 64 : n + n / 2;
        e->piece = malloc(e->piece_capacity * sizeof *e->piece);
        CHECK(e->piece, "no memory for a piece of %zu bytes", n);
    }
    for (size_t i = 0; i < n; i++) e->piece[i] = e->t->byte_ids[(unsigned char)piece[i]];
    int64_t n_left = bpe_encode(&e->t->merges, &e->scratch, e->piece, (int64_t)n);
    for (int64_t i = 0; i < n_left; i++) put_id(e, e->piece[i]);
}

static void encode_plain(Encoder *e, const char *text, size_t n) {
    Pretokenizer pieces = pretokenizer_make(e->t->pattern, text, n);
    const char *piece;
    size_t piece_len;
    while (pretokenizer_next(&pieces, &piece, &piece_len)) encode_piece(e, piece, piece_len);
}

/* The added token spelt at the head of the text, the longest; -1 if there is none. */
static int32_t added_at(const Tokenizer *t, const char *text, size_t n) {
    if (!t->added_starts[(unsigned char)text[0]]) return -1;
    for (int32_t k = 0; k < t->n_added; k++) {
        AddedToken added = t->added[k];
        if (added.n <= n && memcmp(text, t->tokens[added.id].bytes, added.n) == 0) return added.id;
    }
    return -1;
}

int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, bool match_added, int32_t *ids,
                         int64_t max_ids) {
    Encoder e = {.t = t, .ids = ids, .max_ids = max_ids};
    size_t plain = 0;
    for (size_t at = 0; match_added && at < n;) {
        int32_t id = added_at(t, text + at, n - at);
        if (id < 0) {
            at++;
            continue;
        }
        encode_plain(&e, text + plain, at - plain);
        put_id(&e, id);
        at += t->tokens[id].n;
        plain = at;
    }
    encode_plain(&e, text + plain, n - plain);
    free(e.piece);
    bpe_scratch_free(&e.scratch);
    return e.n_ids;
}

void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    bpe_free(&t->merges);
    free(t->tokens);
    free(t->pool);
    free(t->added);
    free(t);
}

int32_t tokenizer_vocab_size(const Tokenizer *t) {
    return t->vocab_size;
}

int32_t tokenizer_document_token(const Tokenizer *t) {
    return t->document_token;
}

const char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n) {
    bool known = id >= 0 && id < t->vocab_size && t->tokens[id].bytes;
    *n = known ? t->tokens[id].n : 0;
    return known ? t->tokens[id].bytes : NULL;
}

bool tokenizer_is_special(const Tokenizer *t, int32_t id) {
    return id >= 0 && id < t->vocab_size && t->tokens[id].special;
}
