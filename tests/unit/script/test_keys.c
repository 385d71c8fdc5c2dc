#include "script/keys.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* SHA-256 of "secret" and of "other". */
#define SECRET "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
#define OTHER  "sha256:d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa"

static const char *file_with(const char *text)
{
    static char path[] = "/tmp/dn-keys-XXXXXX";
    if (strstr(path, "XXXXXX"))
        close(mkstemp(path));
    FILE *f = fopen(path, "w");
    cr_assert(f);
    fputs(text, f);
    fclose(f);
    return path;
}

Test(keys, a_presented_key_is_found_by_its_hash)
{
    struct dn_keys keys;
    struct dn_conf_errors errors = {0};
    cr_assert_eq(dn_keys_read(&keys,
                              file_with("return { { hash = '" SECRET
                                        "', tenant = 'acme', id = 'a', labels = { tier = 'gold' } },\n"
                                        "{ hash = '" OTHER "', tenant = 'b' } }"),
                              &errors),
                 0);
    const struct dn_key *k = dn_keys_find(&keys, "secret", 6);
    cr_assert(k);
    cr_assert_str_eq(k->tenant, "acme");
    cr_assert_str_eq(k->id, "a");
    cr_assert(k->n_labels == 1 && strcmp(k->label[0].name, "tier") == 0 && strcmp(k->label[0].value, "gold") == 0);
    k = dn_keys_find(&keys, "other", 5);
    cr_assert(k);
    cr_assert_str_eq(k->id, "d9298a10");
    cr_assert_null(dn_keys_find(&keys, "secret ", 7));
    cr_assert_null(dn_keys_find(&keys, "", 0));
    dn_keys_release(&keys);
}

Test(keys, errors_are_named_and_show_no_secret)
{
    struct dn_keys keys;
    struct dn_conf_errors errors = {0};
    struct dn_buf out = {0};
    dn_keys_read(&keys,
                 file_with("return {\n"
                           "  { hash = 'canary-key-in-plain', tenant = 'a' },\n"
                           "  { tenant = 'a b', labls = {} },\n"
                           "  { hash = '" SECRET "', tenant = 'a', labels = { x = 1 } },\n"
                           "  'canary',\n"
                           "}"),
                 &errors);
    dn_conf_errors_print(&errors, &out);
    const char *text = dn_buf_str(&out);
    cr_assert_null(strstr(text, "canary"), "%s", text);
    cr_assert(strstr(text, ":2: keys[1].hash: expected \"sha256:\" and 64 hex digits"), "%s", text);
    cr_assert(strstr(text, ":3: keys[2].hash: missing"), "%s", text);
    cr_assert(strstr(text, ":3: keys[2].labls: unknown key (did you mean \"labels\"?)"), "%s", text);
    cr_assert(strstr(text, ":3: keys[2].tenant: expected 1 to 64 printable"), "%s", text);
    cr_assert(strstr(text, ":4: keys[3].labels.x: expected name = \"value\""), "%s", text);
    cr_assert(strstr(text, ":5: keys[4]: expected { hash"), "%s", text);
    cr_assert_eq(errors.n, 6u, "%s", text);
    dn_conf_errors_release(&errors);
    dn_buf_release(&out);
    dn_keys_release(&keys);
}

Test(keys, the_same_key_twice_is_an_error)
{
    struct dn_keys keys;
    struct dn_conf_errors errors = {0};
    dn_keys_read(&keys,
                 file_with("return { { hash = '" SECRET "', tenant = 'a' },\n { hash = '" SECRET "', tenant = 'b' } }"),
                 &errors);
    cr_assert_eq(errors.n, 1u);
    cr_assert(strstr(errors.item[0].text, "keys[2]: the same hash as keys[1] in line 1"), "%s", errors.item[0].text);
    dn_conf_errors_release(&errors);
    dn_keys_release(&keys);
}

Test(keys, a_new_key_opens_with_its_own_entry)
{
    char key[48], again[48];
    struct dn_buf entry = {0}, text = {0};
    dn_keys_new("acme", "ci", key, &entry);
    cr_assert_eq(strlen(key), 46u);
    dn_buf_printf(&text, "return {\n%s}\n", dn_buf_str(&entry));
    cr_assert_null(strstr(text.data, key + 3), "the key itself is not in its entry");
    struct dn_keys keys;
    struct dn_conf_errors errors = {0};
    cr_assert_eq(dn_keys_read(&keys, file_with(dn_buf_str(&text)), &errors), 0, "%s", text.data);
    cr_assert(dn_keys_find(&keys, key, strlen(key)));
    dn_keys_new("acme", "ci", again, &entry);
    cr_assert_str_neq(key, again);
    dn_keys_release(&keys);
    dn_buf_release(&entry);
    dn_buf_release(&text);
}

Test(keys, the_example_that_ships_is_valid)
{
    struct dn_keys keys;
    struct dn_conf_errors errors = {0};
    cr_assert_eq(dn_keys_read(&keys, DN_SOURCE_DIR "/conf/keys.lua", &errors), 0);
    cr_assert_eq(keys.n, 0u, "no key that everybody knows");
    dn_keys_release(&keys);
}
