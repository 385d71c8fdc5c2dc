/* What is written on a terminal and elsewhere while gigabytes are loaded. */
#include "cli/progress.h"

#include "base/clock.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <pty.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GIB(n) ((uint64_t)(n) << 30)
#define CLEAR  "\r\033[K"
#define SECOND DN_NS_PER_S

static int out = -1; /* what stderr of the test writes ends here */

static void on_pipe(void)
{
    int fd[2];
    cr_assert_eq(pipe2(fd, O_NONBLOCK), 0);
    cr_assert_eq(dup2(fd[1], 2), 2);
    out = fd[0];
}

static void on_terminal(void)
{
    int slave;
    struct termios raw;
    cr_assert_eq(openpty(&out, &slave, NULL, NULL, NULL), 0);
    tcgetattr(slave, &raw);
    cfmakeraw(&raw);
    tcsetattr(slave, TCSANOW, &raw);
    fcntl(out, F_SETFL, O_NONBLOCK);
    cr_assert_eq(dup2(slave, 2), 2);
}

/* What has been written since the last call. */
static const char *written(void)
{
    static char text[4096];
    ssize_t n = read(out, text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

/* Begun so many seconds ago. */
static struct dn_progress begun(double seconds)
{
    struct dn_progress p;
    dn_progress_begin(&p, "weights", false);
    p.start_ns -= (uint64_t)(seconds * 1e9);
    return p;
}

/* Long ago, so that a second of this test changes no digit. */
Test(progress, a_terminal_has_one_line_with_rate_and_time_left, .init = on_terminal)
{
    struct dn_progress p = begun(8000);
    dn_progress_update(&p, GIB(80), GIB(100));
    cr_expect_str_eq(written(), CLEAR "weights  "
                                      "████████████████████████░░░░░░  80%  80.0 GiB/100 GiB  10.2 MiB/s  2000 s left");
    p.last_ns = dn_now_ns();
    dn_progress_update(&p, GIB(90), GIB(100));
    cr_expect_str_eq(written(), "", "not more than ten times a second");
    p.last_ns -= SECOND / 10;
    dn_progress_update(&p, GIB(90), GIB(100));
    cr_expect_str_eq(written(), CLEAR "weights  "
                                      "███████████████████████████░░░  90%  90.0 GiB/100 GiB  11.5 MiB/s  889 s left");
    dn_progress_update(&p, GIB(100), GIB(100));
    cr_expect_str_eq(written(), CLEAR "weights  ██████████████████████████████ 100%  100 GiB/100 GiB  12.8 MiB/s",
                     "the end is shown at once, and nothing is left");
    dn_progress_end(&p);
    cr_expect_str_eq(written(), CLEAR, "and the line is taken away");
}

/* A file or a journal: whole lines without control characters, at every tenth or after ten seconds. */
Test(progress, elsewhere_there_is_a_line_now_and_then, .init = on_pipe)
{
    struct dn_progress p = begun(8100);
    dn_progress_update(&p, GIB(81), GIB(100));
    cr_expect_str_eq(written(), "weights    81%  81.0 GiB/100 GiB  10.2 MiB/s  1900 s left\n");
    dn_progress_update(&p, GIB(89), GIB(100));
    cr_expect_str_eq(written(), "", "neither another tenth nor ten seconds");
    dn_progress_update(&p, GIB(90), GIB(100));
    cr_expect_str_eq(written(), "weights    90%  90.0 GiB/100 GiB  11.4 MiB/s  900 s left\n");
    p.last_ns -= 10 * SECOND;
    dn_progress_update(&p, GIB(91), GIB(100));
    cr_expect_str_eq(written(), "weights    91%  91.0 GiB/100 GiB  11.5 MiB/s  801 s left\n", "ten seconds later");
    dn_progress_update(&p, GIB(100), GIB(100));
    cr_expect_str_eq(written(), "weights   100%  100 GiB/100 GiB  12.6 MiB/s\n");
    dn_progress_end(&p);
    cr_expect_str_eq(written(), "");
}

Test(progress, quick_work_needs_no_lines_in_a_file, .init = on_pipe)
{
    struct dn_progress p = begun(0);
    for (int i = 0; i <= 10; i++)
        dn_progress_update(&p, GIB(1) / 10 * (uint64_t)i, GIB(1) / 10 * 10);
    dn_progress_end(&p);
    cr_expect_str_eq(written(), "");
}

Test(progress, quiet_and_nothing_to_do_write_nothing, .init = on_terminal)
{
    struct dn_progress p;
    dn_progress_begin(&p, "weights", true);
    p.start_ns -= 20 * SECOND;
    dn_progress_update(&p, 1, 2);
    dn_progress_update(&p, 2, 2);
    dn_progress_end(&p);
    cr_expect_str_eq(written(), "");
    p = begun(20);
    dn_progress_update(&p, 0, 0);
    dn_progress_end(&p);
    cr_expect_str_eq(written(), "");
}

Test(progress, bytes_are_for_people)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } c[] = {{0, "0 B"},
             {1023, "1023 B"},
             {1024, "1.0 KiB"},
             {102400, "100 KiB"},
             {GIB(1) - 1, "1024 MiB"},
             {GIB(24) - GIB(1) / 2, "23.5 GiB"},
             {GIB(1) << 10, "1.0 TiB"},
             {UINT64_MAX, "16777216 TiB"}};
    char text[16];
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        cr_expect_str_eq(dn_bytes_text(c[i].bytes, text), c[i].text);
}
