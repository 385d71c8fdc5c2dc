#include "http/h2_track.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

static size_t put_frame(uint8_t *at, uint32_t n, uint8_t type, uint8_t flags, uint32_t stream)
{
    memset(at, 0, 9 + n);
    at[0] = (uint8_t)(n >> 16);
    at[1] = (uint8_t)(n >> 8);
    at[2] = (uint8_t)n;
    at[3] = type;
    at[4] = flags;
    at[5] = (uint8_t)(stream >> 24);
    at[6] = (uint8_t)(stream >> 16);
    at[7] = (uint8_t)(stream >> 8);
    at[8] = (uint8_t)stream;
    return 9 + n;
}

static struct dn_h2_track *opened(void)
{
    static struct dn_h2_track t;
    dn_h2_track_init(&t, 1);
    cr_assert(dn_h2_track_input(&t, preface, 24, 1000, 2));
    return &t;
}

static bool feed(struct dn_h2_track *t, uint32_t n, uint8_t type, uint8_t flags, uint32_t stream, uint64_t now_ns)
{
    static uint8_t bytes[1 << 17];
    return dn_h2_track_input(t, bytes, put_frame(bytes, n, type, flags, stream), 1000, now_ns);
}

Test(h2_track, the_preface_has_a_clock)
{
    struct dn_h2_track t;
    dn_h2_track_init(&t, 7);
    cr_assert_eq(dn_h2_track_stuck_since(&t), 7);
    cr_assert(dn_h2_track_input(&t, preface, 10, 1000, 8));
    cr_assert_eq(dn_h2_track_stuck_since(&t), 7);
    cr_assert(!dn_h2_track_at_boundary(&t));
    cr_assert(dn_h2_track_input(&t, preface + 10, 14, 1000, 9));
    cr_assert_eq(dn_h2_track_stuck_since(&t), 0);
    cr_assert(dn_h2_track_at_boundary(&t));
    dn_h2_track_release(&t);
}

Test(h2_track, a_body_is_open_from_headers_to_end_stream)
{
    struct dn_h2_track *t = opened();
    cr_assert(feed(t, 20, 1, 4, 1, 100)); /* HEADERS, END_HEADERS */
    cr_assert_eq(t->n_bodies, 1);
    cr_assert_eq(t->body[0].since_ns, 100);
    cr_assert(feed(t, 500, 0, 0, 1, 200));
    cr_assert(feed(t, 700, 0, 0, 1, 300));
    cr_assert_eq(t->n_body_bytes, 1200);
    cr_assert_eq(t->body[0].since_ns, 100);
    cr_assert(feed(t, 3, 0, 1, 1, 400)); /* END_STREAM */
    cr_assert_eq(t->n_bodies, 0);
    cr_assert_eq(t->n_body_bytes, 0);
    dn_h2_track_release(t);
}

Test(h2_track, a_request_without_a_body_is_never_open)
{
    struct dn_h2_track *t = opened();
    cr_assert(feed(t, 20, 1, 5, 1, 100));
    cr_assert_eq(t->n_bodies, 0);
    dn_h2_track_release(t);
}

Test(h2_track, trailers_reset_and_servers_reset_end_a_body)
{
    struct dn_h2_track *t = opened();
    for (uint32_t id = 1; id <= 5; id += 2) {
        cr_assert(feed(t, 20, 1, 4, id, 100));
        cr_assert(feed(t, 100, 0, 0, id, 100));
    }
    cr_assert_eq(t->n_body_bytes, 300);
    cr_assert(feed(t, 10, 1, 5, 1, 200)); /* trailers */
    cr_assert_eq(t->n_body_bytes, 200);
    cr_assert(feed(t, 4, 3, 0, 3, 200)); /* RST_STREAM */
    cr_assert_eq(t->n_body_bytes, 100);
    uint8_t out[200];
    size_t n = put_frame(out, 50, 0, 0, 5);
    n += put_frame(out + n, 4, 3, 0, 5);
    dn_h2_track_output(t, out, n);
    cr_assert_eq(t->n_bodies, 0);
    dn_h2_track_release(t);
}

Test(h2_track, every_cut_of_the_input_gives_the_same_state)
{
    uint8_t all[4096];
    size_t n = 24;
    memcpy(all, preface, 24);
    n += put_frame(all + n, 6, 4, 0, 0);
    n += put_frame(all + n, 30, 1, 0, 1);
    n += put_frame(all + n, 30, 9, 4, 1);
    n += put_frame(all + n, 700, 0, 0, 1);
    n += put_frame(all + n, 30, 1, 4, 3);
    n += put_frame(all + n, 900, 0, 1, 1);
    n += put_frame(all + n, 0, 0, 0, 3);
    for (size_t step = 1; step < 50; step++) {
        struct dn_h2_track t;
        dn_h2_track_init(&t, 1);
        for (size_t at = 0; at < n; at += step)
            cr_assert(dn_h2_track_input(&t, all + at, step < n - at ? step : n - at, 1000, 5));
        cr_assert(dn_h2_track_at_boundary(&t), "step %zu", step);
        cr_assert_eq(t.n_bodies, 1);
        cr_assert_eq(t.body[0].stream_id, 3);
        cr_assert_eq(t.n_body_bytes, 0);
        dn_h2_track_release(&t);
    }
}

Test(h2_track, a_header_block_has_a_clock_and_a_size)
{
    struct dn_h2_track *t = opened();
    cr_assert(feed(t, 400, 1, 0, 1, 50));
    cr_assert_eq(dn_h2_track_stuck_since(t), 50);
    cr_assert(feed(t, 400, 9, 0, 1, 60));
    cr_assert_eq(dn_h2_track_stuck_since(t), 50);
    cr_assert(!dn_h2_track_at_boundary(t));
    cr_assert(!feed(t, 400, 9, 0, 1, 70)); /* 1,200 of 1,000 bytes */
    dn_h2_track_release(t);
}

Test(h2_track, an_unfinished_data_frame_is_left_to_the_bodys_clock)
{
    struct dn_h2_track *t = opened();
    cr_assert(feed(t, 20, 1, 4, 1, 10));
    uint8_t bytes[2000];
    put_frame(bytes, 1000, 0, 0, 1);
    cr_assert(dn_h2_track_input(t, bytes, 500, 1000, 20));
    cr_assert_eq(dn_h2_track_stuck_since(t), 0);
    cr_assert(!dn_h2_track_at_boundary(t));
    cr_assert(dn_h2_track_input(t, bytes + 500, 509, 1000, 30));
    cr_assert(dn_h2_track_input(t, bytes, 4, 1000, 40)); /* but an unfinished frame header is not */
    cr_assert_eq(dn_h2_track_stuck_since(t), 40);
    dn_h2_track_release(t);
}

Test(h2_track, too_many_open_bodies_are_refused)
{
    struct dn_h2_track *t = opened();
    for (uint32_t i = 0; i < DN_H2_BODIES_MAX; i++)
        cr_assert(feed(t, 20, 1, 4, 2 * i + 1, 10));
    cr_assert(!feed(t, 20, 1, 4, 2 * DN_H2_BODIES_MAX + 1, 10));
    dn_h2_track_release(t);
}

Test(h2_track, random_bytes_never_break_it)
{
    for (unsigned seed = 1; seed <= 300; seed++) {
        struct dn_h2_track t;
        uint8_t bytes[3000];
        srand(seed);
        dn_h2_track_init(&t, 1);
        cr_assert(dn_h2_track_input(&t, preface, 24, 16384, 2));
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)(rand() % 7 == 0 ? rand() : rand() % 10);
        for (size_t at = 0; at < sizeof bytes; at += 300) {
            if (!dn_h2_track_input(&t, bytes + at, 300, 16384, 3))
                break;
            dn_h2_track_output(&t, bytes + at, 300);
            uint64_t sum = 0;
            for (uint32_t i = 0; i < t.n_bodies; i++)
                sum += t.body[i].n_bytes;
            cr_assert_eq(sum, t.n_body_bytes, "seed %u", seed);
        }
        dn_h2_track_release(&t);
    }
}
