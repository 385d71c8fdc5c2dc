/* The trained miniatures of Kimi K2 beside the repository (DN_SHARED_DATA/mini), for tests that skip without them. */
#ifndef DN_TEST_KIMI_MINI_H
#define DN_TEST_KIMI_MINI_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static inline const char *mini_data(void)
{
    const char *other = getenv("DN_TEST_DATA"); /* of a program that runs elsewhere */
    return other ? other : DN_SHARED_DATA;
}

/* The folder of "mini-kimi" or "mini-kimi-int4"; NULL, said, if it is not there.
 *
 * The second one's first shard is a link to the first one's file, which not every copy keeps (some leave its text
 * instead): so a folder of links is made in the build folder. */
static inline const char *mini_path(const char *name)
{
    static const char *const file[] = {
        "config.json",    "generation_config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors",
        "tiktoken.model", "tokenizer_config.json",  "chat_template.jinja",          "model-00001-of-00002.safetensors"};
    static char folder[4096];
    char from[4096], to[4200];
    snprintf(from, sizeof from, "%s/mini/%s/config.json", mini_data(), name);
    if (access(from, R_OK) != 0) {
        printf("SKIPPED: %s is not there\n", from);
        return NULL;
    }
    const char *build = getenv("DN_TEST_DATA") ? "/tmp" : DN_BUILD_DIR;
    snprintf(folder, sizeof folder, "%s/mini", build);
    mkdir(folder, 0777);
    snprintf(folder, sizeof folder, "%s/mini/%s", build, name);
    mkdir(folder, 0777);
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) {
        bool shared = i == sizeof file / sizeof *file - 1;
        snprintf(from, sizeof from, "%s/mini/%s/%s", mini_data(), shared ? "mini-kimi" : name, file[i]);
        snprintf(to, sizeof to, "%s/%s", folder, file[i]);
        if (symlink(from, to) != 0 && access(to, R_OK) != 0)
            printf("%s: cannot be made a link to %s\n", to, from);
    }
    return folder;
}

#endif
