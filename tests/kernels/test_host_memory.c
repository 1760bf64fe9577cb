/* Memory of the machine, from made-up trees of /proc and /sys. */
#include "kernels/base/host_memory.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base/file.h"
#include "tests/test.h"

enum { GIB = 1 << 30 };

static void put(const char *name, const char *text) {
    char path[1024], folder[1024], err[ERR_LEN];
    snprintf(path, sizeof path, "%s/%s", test_tmp_dir(), name);
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    REQUIRE(dir_make(folder, err) == 0 && file_write_durable(path, text, strlen(text), err) == 0, "%s", err);
}

static void expect_memory(double total, double available) {
    int64_t has_total, has_available;
    host_memory(test_tmp_dir(), &has_total, &has_available);
    EXPECT_NEAR((double)has_total / GIB, total, 1e-9);
    EXPECT_NEAR((double)has_available / GIB, available, 1e-9);
}

static const char *const meminfo = "MemTotal:       16777216 kB\nMemFree:          1048576 kB\n"
                                   "MemAvailable:    8388608 kB\nSwapTotal:       4194304 kB\nSwapFree: 2097152 kB\n";

TEST(host_memory_reads_numbers) {
    const char *text = "a 12 kB\nab: 7\nb -3\nc x\nlong 99999999999999999999\n17";
    EXPECT_EQ(text_number(text, "a "), 12);
    EXPECT_EQ(text_number(text, "ab:"), 7);
    EXPECT_EQ(text_number(text, "b "), -1);
    EXPECT_EQ(text_number(text, "c "), -1);
    EXPECT_EQ(text_number(text, "long "), -1);
    EXPECT_EQ(text_number(text, "none"), -1);
    EXPECT_EQ(text_number("", "a"), -1);
    EXPECT_EQ(text_number("max\n", ""), -1);
    EXPECT_EQ(text_number("4096\n", ""), 4096);
}

TEST(host_memory_is_unknown_without_proc) {
    expect_memory(0, 0);
    put("proc/meminfo", "MemTotal: 16777216 kB\n"); /* a kernel that is too old for MemAvailable */
    int64_t total, available;
    host_memory(test_tmp_dir(), &total, &available);
    EXPECT_EQ(available, 0);
}

TEST(host_memory_counts_swap) {
    put("proc/meminfo", meminfo);
    expect_memory(16, 10);
    put("proc/self/cgroup", "0::/user/me\n"); /* without limits */
    put("sys/fs/cgroup/user/me/memory.max", "max\n");
    put("sys/fs/cgroup/user/me/memory.current", "4096\n");
    expect_memory(16, 10);
}

/* The limit of a container or a job is lower than the machine; its page cache is given back. */
TEST(host_memory_obeys_control_groups) {
    put("proc/meminfo", meminfo);
    put("proc/self/cgroup", "0::/job/step\n");
    put("sys/fs/cgroup/job/memory.max", "6442450944\n"); /* 6 GiB for the job, nothing said for its step */
    put("sys/fs/cgroup/job/memory.current", "3221225472\n");
    put("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 1073741824\nactive_file 5\n");
    expect_memory(6, 4);
    put("sys/fs/cgroup/job/step/memory.max", "2147483648\n");
    put("sys/fs/cgroup/job/step/memory.current", "2147483650\n"); /* a little over */
    expect_memory(2, 0);
}

/* In a container the path is that of the host, and the mount shows the container alone. */
TEST(host_memory_obeys_a_container) {
    put("proc/meminfo", meminfo);
    put("proc/self/cgroup", "0::/docker/0123\n");
    put("sys/fs/cgroup/memory.max", "4294967296\n");
    put("sys/fs/cgroup/memory.current", "1073741824\n");
    expect_memory(4, 3);
}

TEST(host_memory_obeys_version_1) {
    put("proc/meminfo", meminfo);
    put("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n");
    put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4294967296\n");
    put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "2147483648\n");
    put("sys/fs/cgroup/memory/a/memory.stat", "cache 9\ntotal_inactive_file 1073741824\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* no limit */
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "2147483648\n");
    expect_memory(4, 3);
}

TEST(host_memory_of_this_machine) {
    int64_t total, available;
    host_memory("", &total, &available);
    EXPECT(total >= 64 << 20 && available > 0, "%lld and %lld bytes", (long long)total, (long long)available);
}
