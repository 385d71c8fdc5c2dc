#include "engine/mapfile.h"

#include "base/buf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int dn_mapfile_init(struct dn_mapfile *m, const char *path, struct dn_err *err)
{
    /* O_NONBLOCK so that a FIFO by this name can't hang us before fstat() refuses it. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return dn_err_set(err, DN_IO, "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0) {
        int code = dn_err_set(err, DN_IO, "%s: %s", path, strerror(errno));
        close(fd);
        return code;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return dn_err_set(err, DN_IO, "%s: not a regular file", path);
    }
    void *data = NULL;
    if (st.st_size > 0) {
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            int code = dn_err_set(err, DN_IO, "%s: can't map %" PRIu64 " bytes: %s", path, (uint64_t)st.st_size,
                                  strerror(errno));
            close(fd);
            return code;
        }
    }
    close(fd);
    *m = (struct dn_mapfile){.data = data, .bytes = (uint64_t)st.st_size};
    return 0;
}

void dn_mapfile_release(struct dn_mapfile *m)
{
    if (m->data != NULL)
        munmap((void *)(uintptr_t)m->data, (size_t)m->bytes);
    *m = (struct dn_mapfile){0};
}

int dn_mapfile_read_text(const char *path, uint64_t max_bytes, char **out, size_t *len, struct dn_err *err)
{
    struct dn_mapfile m;
    int code = dn_mapfile_init(&m, path, err);
    if (code != 0)
        return code;
    if (m.bytes > max_bytes) {
        code = dn_err_set(err, DN_MODEL_FILE, "%s: %" PRIu64 " bytes long, at most %" PRIu64 " are read", path, m.bytes,
                          max_bytes);
    } else {
        *out = dn_strndup(m.bytes ? (const char *)m.data : "", (size_t)m.bytes);
        *len = (size_t)m.bytes;
    }
    dn_mapfile_release(&m);
    return code;
}
