/* Reading a configuration, in order of precedence (later wins): defaults of the table, the file (with the model's own
 * file, if it names one), --set from left to right. Everything happens on the JSON tree: --set replaces items in it,
 * the two forms of RoPE become one, and only then the rows read their values. */
#include "config_table.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/base/file.h"

enum { CONFIG_BYTES_MAX = 4 << 20, PARTS_MAX = 4 };

static bool is_comment(const cJSON *item) {
    return item->string && strcmp(item->string, "//") == 0;
}

static cJSON *member(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* "a, b", cut with "..." where the buffer ends. */
static void list_append(char *list, size_t list_len, const char *name) {
    size_t n = strlen(list);
    if (n + strlen(name) + 2 + 5 < list_len)
        snprintf(list + n, list_len - n, "%s%s", n ? ", " : "", name);
    else if (n + 5 < list_len && strcmp(list + n - 3, "...") != 0)
        snprintf(list + n, list_len - n, ", ...");
}

static bool list_has(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *p = list; (p = strstr(p, name)); p += length)
        if ((p == list || p[-1] == ' ') && (p[length] == ',' || !p[length])) return true;
    return false;
}

/* ------------------------------------------------------------------------------------------------------ one section */

static int refuse_unknown(Reader *r, const char *section, const cJSON *item) {
    char where[WHERE_LEN];
    suggest_key(section, item->string, r->hint);
    read_where(r, section, json_line(item), where, sizeof where);
    if (!section[0]) return err_set(r->err, "%s: unknown section \"%.80s\"", where, item->string);
    return err_set(r->err, "%s: unknown key \"%.80s\" in \"%s\"", where, item->string, section);
}

static cJSON *parse_own(const Field *f) {
    char err[ERR_LEN], hint[ERR_LEN];
    cJSON *item = json_parse(f->def, strlen(f->def), f->name, err, hint, NULL);
    CHECK(item, "default of %s.%s: %s", f->section, f->name, err);
    json_set_line(item, 0);
    return item;
}

static int check_must_equal(Reader *r, const Field *f, const cJSON *item) {
    cJSON *allowed = parse_own(f);
    const cJSON *one;
    bool found = false;
    char values[160] = "", text[96];
    cJSON_ArrayForEach(one, allowed) {
        found = found || cJSON_Compare(one, item, true);
        size_t n = strlen(values);
        char *printed = cJSON_PrintUnformatted(one);
        snprintf(values + n, sizeof values - n, "%s%s", n ? " or " : "", printed ? printed : "");
        cJSON_free(printed);
    }
    cJSON_Delete(allowed);
    if (found) return 0;
    hint_set(r->hint, "%s Nothing else is built here.", f->help);
    return read_refuse(r, f, item, "must be %s, found %s", values, json_describe(item, text, sizeof text));
}

static int read_member(Reader *r, const Field *f, const cJSON *item, void *base) {
    if (f->kind == KIND_MUST_EQUAL) return check_must_equal(r, f, item);
    if (f->kind == KIND_IGNORED) {
        list_append(r->config->ignored, sizeof r->config->ignored, f->name);
        return 0;
    }
    return f->type->read(r, f, item, (char *)base + f->offset);
}

static int refuse_missing(Reader *r, const Field *f, const cJSON *object) {
    char where[WHERE_LEN], expects[256];
    read_where(r, f->section, object ? json_line(object) : 0, where, sizeof where);
    hint_set(r->hint, "%s.%s: %s. %s", f->section, f->name, field_expects(f, expects, sizeof expects), f->help);
    if (!object)
        return err_set(r->err, "%s: %s.%s is missing: there is no section \"%s\"", where, f->section, f->name,
                       f->section);
    return err_set(r->err, "%s: %s.%s is missing", where, f->section, f->name);
}

int section_read(Reader *r, const char *section, const cJSON *object, void *base) {
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        if (is_comment(item)) continue;
        const Field *f = field_find(section, item->string);
        if (!f) return refuse_unknown(r, section, item);
        if (read_member(r, f, item, base) != 0) return -1;
    }
    for (int i = 0; i < config_n_fields; i++) {
        const Field *f = &config_fields[i];
        bool is_stored = f->size > 0 && f->kind != KIND_MUST_EQUAL && f->kind != KIND_IGNORED;
        if (!is_stored || strcmp(f->section, section) != 0 || member(object, f->name)) continue;
        if (!f->def) return refuse_missing(r, f, object);
        cJSON *value = parse_own(f);
        int result = f->type->read(r, f, value, (char *)base + f->offset);
        CHECK(result == 0, "default of %s.%s: %s", f->section, f->name, r->err);
        cJSON_Delete(value);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------- the model's own file */

/* A path in the configuration counts from the configuration's folder, else from the working directory. A folder stands
 * for the config.json in it. */
static bool find_model_file(const char *config_name, const char *path, char *found, size_t found_len) {
    const char *slash = strrchr(config_name, '/');
    for (int attempt = 0; attempt < 2; attempt++) {
        bool beside = attempt == 0 && path[0] != '/' && slash;
        int n = snprintf(found, found_len, "%.*s%s", beside ? (int)(slash - config_name + 1) : 0, config_name, path);
        struct stat st;
        if (n < 0 || (size_t)n + sizeof "/config.json" > found_len || stat(found, &st) != 0) continue;
        if (S_ISDIR(st.st_mode)) snprintf(found + n, found_len - (size_t)n, "/config.json");
        return true;
    }
    return false;
}

static const char model_hint[] =
    "\"model\" is the path of a Hugging Face config.json or of its folder, from this file's folder or from here";

/* "model": "path" becomes the object in that file. */
static int load_model(Reader *r, cJSON *root) {
    const cJSON *item = member(root, "model");
    if (!cJSON_IsString(item)) return 0;
    char where[WHERE_LEN];
    read_where(r, "", json_line(item), where, sizeof where);
    if (!find_model_file(r->name, item->valuestring, r->model_name, sizeof r->model_name)) {
        r->model_name[0] = 0;
        hint_set(r->hint, "%s", model_hint);
        return err_set(r->err, "%s: \"model\": there is no file \"%.300s\"", where, item->valuestring);
    }
    cJSON *model = json_load(r->model_name, CONFIG_BYTES_MAX, r->err, r->hint);
    if (!model && !r->hint[0]) hint_set(r->hint, "%s", model_hint);
    if (!model) return -1;
    if (!cJSON_IsObject(model)) {
        cJSON_Delete(model);
        return err_set(r->err, "%s: must be an object, as in a Hugging Face config.json", r->model_name);
    }
    snprintf(r->config->model.path, sizeof r->config->model.path, "%s", r->model_name);
    cJSON_ReplaceItemInObjectCaseSensitive(root, "model", model);
    return 0;
}

/* Moves a member; where the new place is taken, both have to be equal. */
static int move_member(Reader *r, cJSON *from, const char *name, cJSON *to, const char *new_name) {
    cJSON *item = member(from, name);
    if (!item || (from == to && strcmp(name, new_name) == 0)) return 0;
    const cJSON *taken = member(to, new_name);
    if (taken && !cJSON_Compare(taken, item, true)) {
        char where[WHERE_LEN];
        read_where(r, "model", json_line(item), where, sizeof where);
        hint_set(r->hint, "keep one of the two forms");
        return err_set(r->err, "%s: model: \"%s\" and \"%s\" are both given and differ (line %d)", where, new_name,
                       name, json_line(taken));
    }
    cJSON_DetachItemViaPointer(from, item);
    if (taken)
        cJSON_Delete(item);
    else
        cJSON_AddItemToObject(to, new_name, item);
    return 0;
}

static int normalise_type(Reader *r, cJSON *scaling) {
    return cJSON_IsObject(scaling) ? move_member(r, scaling, "type", scaling, "rope_type") : 0;
}

/* rope_parameters of transformers 5 becomes rope_theta and rope_scaling of 4; "type" becomes "rope_type". */
static int normalise_rope(Reader *r, cJSON *model) {
    cJSON *parameters = member(model, "rope_parameters");
    if (normalise_type(r, member(model, "rope_scaling")) != 0 || normalise_type(r, parameters) != 0) return -1;
    if (!parameters) return 0;
    if (!cJSON_IsNull(parameters) && !cJSON_IsObject(parameters))
        return read_refuse_value(r, field_find("model", "rope_parameters"), parameters);
    if (move_member(r, parameters, "rope_theta", model, "rope_theta") != 0) return -1;
    const cJSON *type = member(parameters, "rope_type"), *scaling = member(model, "rope_scaling");
    bool is_plain = !type || (cJSON_IsString(type) && strcmp(type->valuestring, "default") == 0);
    bool has_more = cJSON_GetArraySize(parameters) > (type ? 1 : 0);
    if (cJSON_IsNull(parameters) || (is_plain && !has_more && (!scaling || cJSON_IsNull(scaling)))) {
        cJSON_DeleteItemFromObjectCaseSensitive(model, "rope_parameters");
        return 0;
    }
    return move_member(r, model, "rope_parameters", model, "rope_scaling");
}

/* ----------------------------------------------------------------------------------------------------------- --set */

static int refuse_set(Reader *r, const char *set, const char *what) {
    hint_set(r->hint, "for example --set train.lr=3e-4");
    return err_set(r->err, "--set %.200s: %s", set, what);
}

/* JSON, else a string. What opens a list or an object has to be JSON; a text field takes 2024 or true as text. */
static cJSON *set_value(Reader *r, const Field *f, const char *text, int index) {
    char name[96], err[ERR_LEN], hint[ERR_LEN];
    snprintf(name, sizeof name, "--set %.80s", r->sets[index]);
    cJSON *item = json_parse(text, strlen(text), name, err, hint, NULL);
    if (!item && (text[0] == '[' || text[0] == '{' || text[0] == '"')) {
        err_set(r->err, "%s", err);
        hint_set(r->hint, "%s", hint);
        return NULL;
    }
    bool is_scalar = item && !cJSON_IsString(item) && !cJSON_IsArray(item) && !cJSON_IsObject(item);
    if (!item || (is_scalar && f && f->type == &type_text)) {
        cJSON_Delete(item);
        item = cJSON_CreateString(text);
        CHECK(item, "no memory");
    }
    json_set_line(item, -index - 1);
    return item;
}

static void put_member(cJSON *object, const char *name, cJSON *value) {
    cJSON_DeleteItemFromObjectCaseSensitive(object, name);
    cJSON_AddItemToObject(object, name, value);
}

/* Walks to the object of "a.b", making what is missing or null. NULL with err if something else is in the way. */
static cJSON *object_at(Reader *r, cJSON *root, const char *section, int index) {
    char parts[PATH_LEN], *rest = parts, *part;
    cJSON *at = root;
    snprintf(parts, sizeof parts, "%s", section);
    while ((part = strsep(&rest, "."))) {
        cJSON *next = member(at, part);
        if (!next || cJSON_IsNull(next)) {
            next = cJSON_CreateObject();
            CHECK(next, "no memory");
            json_set_line(next, -index - 1);
            put_member(at, part, next);
        } else if (!cJSON_IsObject(next)) {
            refuse_set(r, r->sets[index], "the value that it would go into is no object");
            return NULL;
        }
        at = next;
    }
    return at;
}

/* steps and tokens are two ways to say one thing, so a --set of one replaces the file's other. */
static void drop_other_length(cJSON *train, const cJSON *value, const char *other) {
    if (!cJSON_IsNull(value)) cJSON_DeleteItemFromObjectCaseSensitive(train, other);
}

static void note_override(Config *c, const char *key) {
    if (list_has(c->overrides, key)) return;
    list_append(c->overrides, sizeof c->overrides, key);
    c->n_overrides++;
}

static int apply_set(Reader *r, cJSON *root, int index) {
    const char *set = r->sets[index], *equals = strchr(set, '=');
    char key[128], *dot;
    if (!equals || equals == set || (size_t)(equals - set) >= sizeof key)
        return refuse_set(r, set, "must be section.field=value");
    snprintf(key, sizeof key, "%.*s", (int)(equals - set), set);
    if (strpbrk(key, " \t")) return refuse_set(r, set, "must be section.field=value, without spaces around the =");
    if (strcmp(key, "model") == 0) {
        cJSON *value = set_value(r, NULL, equals + 1, index);
        if (!value) return -1;
        put_member(root, "model", value);
        r->model_name[0] = 0;
        note_override(r->config, key);
        return load_model(r, root);
    }
    dot = strrchr(key, '.');
    if (!dot && !section_exists(key)) {
        suggest_key("", key, r->hint);
        return err_set(r->err, "--set %.200s: unknown field \"%s\"; write section.field=value", set, key);
    }
    if (!dot) return refuse_set(r, set, "names a section; write section.field=value");
    *dot = 0;
    const Field *f = strchr(key, '[') ? NULL : field_find(key, dot + 1);
    if (!f) {
        suggest_key(key, dot + 1, r->hint);
        return err_set(r->err, "--set %.200s: unknown field \"%s.%s\"", set, key, dot + 1);
    }
    cJSON *value = set_value(r, f, equals + 1, index), *object = value ? object_at(r, root, key, index) : NULL;
    if (!object) {
        cJSON_Delete(value);
        return -1;
    }
    put_member(object, dot + 1, value);
    if (f == field_find("train", "steps")) drop_other_length(object, value, "tokens");
    if (f == field_find("train", "tokens")) drop_other_length(object, value, "steps");
    *dot = '.';
    note_override(r->config, key);
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- the whole file
 */

static int check_root(Reader *r, const cJSON *root) {
    if (!cJSON_IsObject(root)) {
        char found[96];
        return err_set(r->err, "%s: must hold an object, found %s", r->name, json_describe(root, found, sizeof found));
    }
    if (member(root, "hidden_size") && !member(root, "train")) {
        hint_set(r->hint, "write a configuration with \"model\": \"%.200s\" beside data and train", r->name);
        return err_set(r->err, "%s: this is a Hugging Face config.json, not a configuration of a run", r->name);
    }
    const Field *version = field_find("", "version");
    const cJSON *item = member(root, "version");
    if (!item) {
        hint_set(r->hint, "write \"version\": 1");
        return err_set(r->err, "%s: \"version\" is missing", r->name);
    }
    if (version->type->read(r, version, item, &r->config->version) == 0) return 0;
    char where[WHERE_LEN], found[96];
    read_where(r, "", json_line(item), where, sizeof where);
    hint_set(r->hint, "this program reads version 1");
    return err_set(r->err, "%s: \"version\" must be 1, found %s", where, json_describe(item, found, sizeof found));
}

static int check_sections(Reader *r, const cJSON *root) {
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        if (is_comment(item) || strcmp(item->string, "version") == 0) continue;
        if (!section_is_top(item->string) || !section_exists(item->string)) return refuse_unknown(r, "", item);
        if (cJSON_IsObject(item)) continue;
        char where[WHERE_LEN], found[96];
        read_where(r, "", json_line(item), where, sizeof where);
        hint_set(r->hint, "write \"%s\": {...}; ./train_moe help %s lists its keys", item->string, item->string);
        return err_set(r->err, "%s: section \"%s\" must be an object, found %s", where, item->string,
                       json_describe(item, found, sizeof found));
    }
    return 0;
}

/* A model of the V2 family has other defaults for its gate than the table's, so it has to name it. */
static int check_gate_is_named(Reader *r, const cJSON *model) {
    const cJSON *type = member(model, "model_type");
    bool is_v2 = cJSON_IsString(type) && strcmp(type->valuestring, "deepseek_v2") == 0;
    if (!is_v2) return 0;
    if (!member(model, "scoring_func")) return refuse_missing(r, field_find("model", "scoring_func"), model);
    if (!member(model, "topk_method")) return refuse_missing(r, field_find("model", "topk_method"), model);
    return 0;
}

static int read_tree(Reader *r, cJSON *root, int n_sets) {
    Config *c = r->config;
    if (check_root(r, root) != 0 || load_model(r, root) != 0) return -1;
    cJSON *model = member(root, "model");
    if (cJSON_IsObject(model) && normalise_rope(r, model) != 0) return -1;
    for (int i = 0; i < n_sets; i++) {
        if (apply_set(r, root, i) != 0) return -1;
        model = member(root, "model");
        if (cJSON_IsObject(model) && normalise_rope(r, model) != 0) return -1;
    }
    if (check_sections(r, root) != 0) return -1;
    if (cJSON_IsObject(model) && check_gate_is_named(r, model) != 0) return -1;
    for (int i = 0; i < config_n_fields; i++) {
        const char *section = config_fields[i].section;
        if (!section_is_top(section) || (i > 0 && strcmp(config_fields[i - 1].section, section) == 0)) continue;
        if (section_read(r, section, member(root, section), c) != 0) return -1;
    }
    return config_finish(r) != 0 ? -1 : config_check_rules(r);
}

/* A syntax error inside a known field also says what that field takes. */
static void hint_field(Reader *r, const char *key) {
    char section[JSON_PATH_LEN], expects[256];
    snprintf(section, sizeof section, "%s", key);
    char *dot = strrchr(section, '.');
    if (!dot) return;
    *dot = 0;
    const Field *f = field_find(section, dot + 1);
    size_t n = strlen(r->hint);
    if (f && f->type != &type_any)
        snprintf(r->hint + n, ERR_LEN - n, "%s%s takes %s", n ? "; " : "", key,
                 field_expects(f, expects, sizeof expects));
}

int config_parse(Config *c, const char *text, size_t size, const char *name, const char *const *sets, int n_sets,
                 char *err, char *hint) {
    char key[JSON_PATH_LEN];
    Reader r = {.config = c, .err = err, .hint = hint, .name = name, .sets = sets};
    memset(c, 0, sizeof *c);
    err[0] = hint[0] = 0;
    if (strlen(name) >= sizeof c->path) return err_set(err, "%.200s...: the path is too long", name);
    memcpy(c->path, name, strlen(name));
    cJSON *root = json_parse(text, size, name, err, hint, key);
    if (!root) {
        hint_field(&r, key);
        return -1;
    }
    int result = read_tree(&r, root, n_sets);
    cJSON_Delete(root);
    return result;
}

int config_load(Config *c, const char *path, const char *const *sets, int n_sets, char *err, char *hint) {
    char *text;
    size_t size;
    hint[0] = 0;
    if (file_read_all(&text, &size, path, CONFIG_BYTES_MAX, err) != 0) {
        hint_set(hint, "configs/ holds examples");
        return -1;
    }
    int result = config_parse(c, text, size, path, sets, n_sets, err, hint);
    free(text);
    return result;
}
