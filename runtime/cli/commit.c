#include "cli/commit.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

const char *dn_commit(void)
{
    return DN_COMMIT; /* commit.cmake */
}

const char *dn_commit_of(const void *in_library)
{
    Dl_info info;
    if (dladdr(in_library, &info) == 0 || info.dli_fname == NULL)
        return NULL;
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL)
        return NULL;
    const char *commit = dlsym(library, "dn_backend_commit");
    dlclose(library); /* a backend's library stays loaded all the same */
    return commit;
}

bool dn_commit_differs(const void *in_library, char text[200])
{
    const char *commit = dn_commit_of(in_library);
    text[0] = '\0';
    if (commit == NULL || strcmp(commit, dn_commit()) == 0)
        return false;
    snprintf(text, 200, "the backend's library is of commit %.40s, the program of %.40s: build both together", commit,
             dn_commit());
    return true;
}
