#include "policy_util.h"

#include <math.h>

#define S 1000000000ull

Test(bucket, fills_at_its_rate_and_up_to_its_burst)
{
    struct dn_buckets *b = dn_buckets_open(0);
    unsigned id;
    double wait_ms = -1;
    cr_assert_eq(dn_bucket_open(b, "x", 10, 100, &id, &err), 0);
    cr_assert(dn_bucket_take(b, id, "k", 1, 60, 5 * S, &wait_ms));
    cr_assert_eq(wait_ms, 0);
    cr_assert(!dn_bucket_take(b, id, "k", 1, 60, 5 * S, &wait_ms));
    cr_assert_eq(wait_ms, 2000);
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, 6 * S), 50);
    cr_assert(dn_bucket_take(b, id, "k", 1, 60, 7 * S, &wait_ms));
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, 7 * S), 0);
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, 700 * S), 100);
    dn_buckets_close(b);
}

Test(bucket, give_never_lifts_over_the_burst)
{
    struct dn_buckets *b = dn_buckets_open(0);
    unsigned id;
    double wait_ms;
    dn_bucket_open(b, "x", 1, 100, &id, &err);
    dn_bucket_take(b, id, "k", 1, 30, S, &wait_ms);
    dn_bucket_give(b, id, "k", 1, 10, S);
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, S), 80);
    dn_bucket_give(b, id, "k", 1, 1e9, S);
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, S), 100);
    dn_buckets_close(b);
}

Test(bucket, more_than_the_burst_waits_for_a_full_one_and_leaves_a_debt)
{
    struct dn_buckets *b = dn_buckets_open(0);
    unsigned id;
    double wait_ms;
    dn_bucket_open(b, "x", 10, 100, &id, &err);
    cr_assert(dn_bucket_take(b, id, "k", 1, 300, S, &wait_ms));
    cr_assert_eq(dn_bucket_level(b, id, "k", 1, S), -200);
    cr_assert(!dn_bucket_take(b, id, "k", 1, 300, S, &wait_ms));
    cr_assert_eq(wait_ms, 30000);
    dn_buckets_close(b);
}

Test(bucket, keys_and_names_are_apart_and_time_never_runs_backwards)
{
    struct dn_buckets *b = dn_buckets_open(0);
    unsigned x, y, again;
    double wait_ms;
    dn_bucket_open(b, "x", 1, 10, &x, &err);
    dn_bucket_open(b, "y", 1, 10, &y, &err);
    cr_assert(dn_bucket_take(b, x, "k", 1, 10, 9 * S, &wait_ms));
    cr_assert(dn_bucket_take(b, y, "k", 1, 10, 9 * S, &wait_ms));
    cr_assert(dn_bucket_take(b, x, "l", 1, 10, 9 * S, &wait_ms));
    cr_assert(!dn_bucket_take(b, x, "k", 1, 1, 5 * S, &wait_ms));
    cr_assert_eq(dn_bucket_level(b, x, "k", 1, 9 * S), 0);
    /* Opened again with other limits it keeps its level, clipped. */
    dn_bucket_open(b, "x", 1, 4, &again, &err);
    cr_assert_eq(again, x);
    cr_assert_eq(dn_bucket_level(b, x, "k", 1, 10 * S), 1);
    cr_assert_eq(dn_bucket_level(b, x, "m", 1, 10 * S), 4);
    cr_assert(!dn_bucket_take(b, 200, "k", 1, 1, S, &wait_ms), "an unknown bucket gives nothing");
    dn_buckets_close(b);
}

Test(bucket, a_flood_of_keys_forgets_the_fullest_and_keeps_the_debtor)
{
    struct dn_buckets *b = dn_buckets_open(512);
    unsigned id;
    double wait_ms;
    dn_bucket_open(b, "x", 0.001, 100, &id, &err);
    cr_assert(dn_bucket_take(b, id, "debtor", 6, 100, S, &wait_ms));
    for (int i = 0; i < 100000; i++) {
        char key[16];
        int n = snprintf(key, sizeof key, "k%d", i);
        cr_assert(dn_bucket_take(b, id, key, (size_t)n, 1, S, &wait_ms));
    }
    cr_assert_eq(dn_bucket_level(b, id, "debtor", 6, S), 0);
    cr_assert_gt(dn_buckets_forgotten(b), 90000);
    dn_buckets_close(b);
}

Test(bucket, names_are_bounded)
{
    struct dn_buckets *b = dn_buckets_open(512);
    unsigned id;
    for (int i = 0; i < DN_BUCKET_NAMES; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        cr_assert_eq(dn_bucket_open(b, name, 1, 1, &id, &err), 0);
    }
    cr_assert_eq(dn_bucket_open(b, "one more", 1, 1, &id, &err), -DN_POLICY);
    cr_assert(strstr(err.text, "one more"));
    char name[300];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    cr_assert_eq(dn_bucket_open(b, name, 1, 1, &id, &err), -DN_POLICY);
    dn_buckets_close(b);
}

/* Runs a script in LuaJIT with the bench's modules, returns what it prints. */
static void run_bench(const char *script, char *out, size_t cap)
{
    char command[4096];
    snprintf(command, sizeof command,
             "LUA_PATH='" DN_SOURCE_DIR "/lua/?.lua;" DN_SOURCE_DIR "/lua/?/init.lua;;' luajit -e '%s'", script);
    FILE *p = popen(command, "r");
    cr_assert_not_null(p);
    size_t n = fread(out, 1, cap - 1, p);
    out[n] = '\0';
    cr_assert_eq(pclose(p), 0, "%s", out);
}

Test(bucket, the_stand_in_of_the_bench_gives_the_same_numbers)
{
    if (system("luajit -v >/dev/null 2>&1") != 0) {
        printf("SKIPPED: no luajit program to run the bench with\n");
        return;
    }
    static char got[1 << 16], want[1 << 16];
    run_bench("local bench = require(\"dunlin.testing\") local now = 0 "
              "local b = bench.buckets(function() return now end) local id = b.open(\"x\", 7, 1000) local seed = 42 "
              "for i = 1, 500 do seed = (seed * 11035 + 12345) % 1048573 now = now + seed % 977 "
              "local key, n = \"k\" .. seed % 5, seed % 1500 "
              "if i == 250 then b.open(\"x\", 11, 600) end "
              "if seed % 3 == 0 then b.give(id, key, n) io.write(b.level(id, key) * 1000 - b.level(id, key) * 1000 % "
              "1, \"\\n\") "
              "else local ok, wait = b.take(id, key, n) io.write(tostring(ok), \" \", wait, \"\\n\") end end",
              got, sizeof got);
    struct dn_buckets *b = dn_buckets_open(0);
    unsigned id;
    dn_bucket_open(b, "x", 7, 1000, &id, &err);
    uint64_t seed = 42, now = 0;
    size_t len = 0;
    for (int i = 1; i <= 500; i++) {
        seed = (seed * 11035 + 12345) % 1048573;
        now += seed % 977;
        char key[8];
        int k = snprintf(key, sizeof key, "k%d", (int)(seed % 5));
        double n = (double)(seed % 1500), wait = 0;
        if (i == 250)
            dn_bucket_open(b, "x", 11, 600, &id, &err);
        if (seed % 3 == 0) {
            dn_bucket_give(b, id, key, (size_t)k, n, now * 1000000);
            double level = dn_bucket_level(b, id, key, (size_t)k, now * 1000000) * 1000;
            len += (size_t)snprintf(want + len, sizeof want - len, "%.14g\n", floor(level));
        } else {
            bool ok = dn_bucket_take(b, id, key, (size_t)k, n, now * 1000000, &wait);
            len += (size_t)snprintf(want + len, sizeof want - len, "%s %.14g\n", ok ? "true" : "false", wait);
        }
    }
    dn_buckets_close(b);
    cr_assert_str_eq(got, want);
}

Test(bucket, the_bench_hashes_as_the_node_does)
{
    if (system("luajit -v >/dev/null 2>&1") != 0) {
        printf("SKIPPED: no luajit program to run the bench with\n");
        return;
    }
    static char got[1 << 16], want[1 << 16];
    run_bench("local h = require(\"dunlin.testing\").hash for i = 1, 300 do "
              "io.write(h((\"key\\0\" .. i):rep(i % 7), ({ 2, 100, 10000, 4294967296 })[i % 4 + 1]), \"\\n\") end",
              got, sizeof got);
    static const uint64_t range[] = {2, 100, 10000, 4294967296u};
    size_t len = 0;
    for (int i = 1; i <= 300; i++) {
        char one[16], key[128];
        one[0] = 'k', one[1] = 'e', one[2] = 'y', one[3] = '\0';
        size_t n = 4 + (size_t)snprintf(one + 4, sizeof one - 4, "%d", i), total = 0;
        for (int r = 0; r < i % 7; r++, total += n)
            memcpy(key + total, one, n);
        len += (size_t)snprintf(want + len, sizeof want - len, "%u\n", dn_policy_hash(key, total, range[i % 4]));
    }
    cr_assert_str_eq(got, want);
}

Test(bucket, hash_is_spread_evenly_and_never_changes)
{
    cr_assert_eq(dn_policy_hash("", 0, 4294967296u), 0xba992926u, "%08x", dn_policy_hash("", 0, 4294967296u));
    cr_assert_eq(dn_policy_hash("acme", 4, 10000), 7574u); /* computed with Python */
    unsigned slot[10] = {0};
    for (int i = 0; i < 10000; i++) {
        char key[16];
        slot[dn_policy_hash(key, (size_t)snprintf(key, sizeof key, "s%d", i), 10)]++;
    }
    for (int i = 0; i < 10; i++)
        cr_assert(slot[i] > 880 && slot[i] < 1120, "%u", slot[i]);
}

Test(bucket, buckets_and_params_survive_a_reload)
{
    struct dn_policy_item item = {
        .file = "p.lua",
        .source = "local dunlin = require('dunlin') local b = dunlin.bucket('b', { rate = 0.001, burst = 3 }) "
                  "return { api = 1, name = 'p', admit = function(req) if not b:take('k') then "
                  "return dunlin.reject(429, 'spent', '') end end }"};
    struct fixture f = open_items(&item, 1);
    cr_assert(admit(&f) && admit(&f));
    cr_assert_eq(dn_policy_reload(f.p, NULL, &err), 0, "%s", err.text);
    cr_assert(admit(&f), "the smoke test of the reload must not spend the node's buckets");
    cr_assert(!admit(&f));
    cr_assert_eq(reject.status, 429);
    cr_assert_eq(trace.generation, 2);
    close_fixture(&f);
}
