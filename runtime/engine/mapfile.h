/* A file mapped read-only into memory: model files are read in place.
 *
 * Ownership: the caller holds the struct; dn_mapfile_release() unmaps. Any thread may read.
 *
 * A file that another process truncates while it is mapped raises SIGBUS when a page behind its new end is read: the
 * process dies. There is no portable way to survive that without copying the file first, so we don't try: sizes are
 * taken once, from the open descriptor; replace model files by renaming a new one over them, which leaves the mapping
 * whole.
 */
#ifndef DN_ENGINE_MAPFILE_H
#define DN_ENGINE_MAPFILE_H

#include "base/err.h"

#include <stdint.h>

struct dn_mapfile {
    const uint8_t *data; /* NULL if the file is empty */
    uint64_t bytes;
};

/* Maps a regular file. DN_IO with the path and the reason; anything but a regular file is refused. */
int dn_mapfile_init(struct dn_mapfile *m, const char *path, struct dn_err *err);
void dn_mapfile_release(struct dn_mapfile *m);

/* A whole small file as a terminated string (free() it), at most max_bytes. */
int dn_mapfile_read_text(const char *path, uint64_t max_bytes, char **out, size_t *len, struct dn_err *err);

#endif
