#include "engine/mapfile.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[32];

static const char *path_of(const char *name)
{
    static char path[64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void make_folder(void)
{
    snprintf(folder, sizeof folder, "/tmp/dn_map_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void put(const char *path, const char *text)
{
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
}

TestSuite(mapfile, .init = make_folder);

Test(mapfile, maps_and_an_empty_file_is_no_error)
{
    struct dn_mapfile m;
    struct dn_err err = {0};
    put(path_of("some"), "bytes");
    cr_assert_eq(dn_mapfile_init(&m, path_of("some"), &err), 0, "%s", err.text);
    cr_assert(m.bytes == 5 && memcmp(m.data, "bytes", 5) == 0);
    dn_mapfile_release(&m);
    put(path_of("some"), "");
    cr_assert_eq(dn_mapfile_init(&m, path_of("some"), &err), 0, "%s", err.text);
    cr_assert(m.bytes == 0 && m.data == NULL);
    dn_mapfile_release(&m);
    unlink(path_of("some"));
    rmdir(folder);
}

/* A replaced file leaves the mapping whole: how operators must change models under a running node. */
Test(mapfile, a_rename_over_the_file_leaves_the_mapping_whole)
{
    struct dn_mapfile m;
    struct dn_err err = {0};
    char to[64];
    put(path_of("old"), "old bytes");
    cr_assert_eq(dn_mapfile_init(&m, path_of("old"), &err), 0, "%s", err.text);
    snprintf(to, sizeof to, "%s", path_of("old"));
    put(path_of("new"), "new");
    cr_assert_eq(rename(path_of("new"), to), 0);
    cr_assert(m.bytes == 9 && memcmp(m.data, "old bytes", 9) == 0);
    dn_mapfile_release(&m);
    unlink(to);
    rmdir(folder);
}

/* Nobody writes into the FIFO: an open() that waits would hang here. */
Test(mapfile, only_regular_files_are_mapped, .timeout = 10)
{
    struct dn_mapfile m;
    struct dn_err err = {0};
    cr_assert_eq(mkfifo(path_of("fifo"), 0600), 0);
    cr_assert_eq(dn_mapfile_init(&m, path_of("fifo"), &err), -DN_IO);
    cr_assert_not_null(strstr(err.text, "/fifo: not a regular file"));
    cr_assert_eq(dn_mapfile_init(&m, folder, &err), -DN_IO);
    cr_assert_not_null(strstr(err.text, ": not a regular file"));
    unlink(path_of("fifo"));
    rmdir(folder);
}

Test(mapfile, a_text_longer_than_the_limit_is_refused)
{
    char *text;
    size_t len;
    struct dn_err err = {0};
    put(path_of("text"), "12345");
    cr_assert_eq(dn_mapfile_read_text(path_of("text"), 5, &text, &len, &err), 0, "%s", err.text);
    cr_assert(len == 5 && strcmp(text, "12345") == 0);
    free(text);
    cr_assert_eq(dn_mapfile_read_text(path_of("text"), 4, &text, &len, &err), -DN_MODEL_FILE);
    cr_assert_not_null(strstr(err.text, "5 bytes long, at most 4 are read"));
    unlink(path_of("text"));
    rmdir(folder);
}
