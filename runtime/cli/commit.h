/* Which commit the program and the library of a backend were built from: a library that was left behind has the right
 * interface and other kernels. Constant; any thread.
 */
#ifndef DN_CLI_COMMIT_H
#define DN_CLI_COMMIT_H

#include <stdbool.h>

/* "0d5d6b91c2e4", with "-dirty" behind it if there were changes; "unknown" outside of a repository. */
const char *dn_commit(void);

/* The same of the shared library that holds something: its dn_backend, or the table of operations of a device of it.
 * NULL: it is in the program itself, or in a library that does not say. */
const char *dn_commit_of(const void *in_library);

/* Whether that is another commit than the program's: then a line says so into text, else "". */
bool dn_commit_differs(const void *in_library, char text[200]);

#endif
