/* See host_memory.h. */
#include "host_memory.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 8192 };

int64_t text_number(const char *text, const char *key) {
    const size_t n = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, n) != 0) continue;
        char *end;
        errno = 0;
        const long long value = strtoll(line + n, &end, 10);
        return end == line + n || errno || value < 0 ? -1 : value;
    }
    return -1;
}

/* A file of /proc or /sys, whose size is not known before; "" if there is none. */
static void read_text(char *text, const char *root, const char *folder, const char *name) {
    char path[PATH_MAX];
    text[0] = 0;
    if (snprintf(path, sizeof path, "%s%s/%s", root, folder, name) >= (int)sizeof path) return;
    FILE *f = fopen(path, "r");
    if (!f) return;
    text[fread(text, 1, TEXT_MAX - 1, f)] = 0;
    fclose(f);
}

typedef struct {
    const char *limit, *used, *cache; /* cache: the line of memory.stat that counts what is given back under pressure */
} GroupFiles;
static const GroupFiles version_2 = {"memory.max", "memory.current", "inactive_file "};
static const GroupFiles version_1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};

/* One folder of the tree. No limit reads "max" (v2) or a number beyond any machine (v1). */
static void apply_group(const char *root, const char *folder, const GroupFiles *files, int64_t *total,
                        int64_t *available) {
    char text[TEXT_MAX];
    read_text(text, root, folder, files->limit);
    const int64_t limit = text_number(text, "");
    read_text(text, root, folder, files->used);
    int64_t used = text_number(text, "");
    if (limit < 0 || used < 0) return;
    read_text(text, root, folder, "memory.stat");
    const int64_t cache = text_number(text, files->cache);
    if (cache > 0) used -= cache < used ? cache : used;
    if (limit < *total) *total = limit;
    const int64_t left = limit > used ? limit - used : 0;
    if (left < *available) *available = left;
}

/* The group and all above it: the tightest rules. Inside a container the group's own path may not exist: then the
 * mount's root is the container's. */
static void apply_groups(const char *root, const char *mount, const char *group, const GroupFiles *files,
                         int64_t *total, int64_t *available) {
    char folder[PATH_MAX];
    if (snprintf(folder, sizeof folder, "%s%s", mount, group) >= (int)sizeof folder) return;
    for (;;) {
        size_t n = strlen(folder);
        while (n > strlen(mount) && folder[n - 1] == '/') folder[--n] = 0;
        apply_group(root, folder, files, total, available);
        char *slash = strrchr(folder, '/');
        if (n <= strlen(mount) || !slash) return;
        *slash = 0;
    }
}

void host_memory(const char *root, int64_t *total, int64_t *available) {
    char text[TEXT_MAX];
    read_text(text, root, "/proc", "meminfo");
    const int64_t all = text_number(text, "MemTotal:"), left = text_number(text, "MemAvailable:");
    const int64_t swap = text_number(text, "SwapFree:");
    *total = all > 0 ? all * 1024 : 0;
    *available = left > 0 ? (left + (swap > 0 ? swap : 0)) * 1024 : 0;
    if (*total == 0 || *available == 0) return;
    /* Lines "0::/path" (v2) and "N:controller,...:/path" (v1). */
    read_text(text, root, "/proc", "self/cgroup");
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        if (controllers[1] == 0)
            apply_groups(root, "/sys/fs/cgroup", path, &version_2, total, available);
        else if (strstr(controllers, "memory"))
            apply_groups(root, "/sys/fs/cgroup/memory", path, &version_1, total, available);
    }
}
