#include "kernels/cpu/isa.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

Test(isa, auto_is_the_best_of_this_machine)
{
    enum dn_isa isa = DN_ISA_COUNT;
    cr_assert_eq(dn_isa_parse("auto", &isa, NULL), 0);
    cr_assert_eq(isa, dn_isa_detect());
    isa = DN_ISA_COUNT;
    cr_assert_eq(dn_isa_parse(NULL, &isa, NULL), 0);
    cr_assert_eq(isa, dn_isa_detect());
}

Test(isa, names_up_to_the_best_are_taken_and_others_refused)
{
    for (int i = 0; i < DN_ISA_COUNT; i++) {
        enum dn_isa isa = DN_ISA_COUNT;
        struct dn_err err = {0};
        const char *name = dn_isa_name((enum dn_isa)i);
        int rc = dn_isa_parse(name, &isa, &err);
        if (i <= (int)dn_isa_detect()) {
            cr_assert_eq(rc, 0, "%s", name);
            cr_assert_eq((int)isa, i);
        } else {
            cr_assert_eq(rc, -DN_CONFIG, "%s", name);
            cr_assert_eq((int)isa, DN_ISA_COUNT, "left alone");
            cr_assert(strstr(err.text, name), "%s", err.text);
        }
    }
    enum dn_isa isa = DN_ISA_COUNT;
    struct dn_err err = {0};
    cr_assert_eq(dn_isa_parse("AVX-512", &isa, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "AVX-512") && strstr(err.text, "portable"), "%s", err.text);
}

/* What the kernel tells of the processor, as a second opinion; it also leaves out what it does not save. */
Test(isa, agrees_with_the_system)
{
    FILE *f = fopen("/proc/cpuinfo", "r");
    static char line[16384];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f))
        found = strncmp(line, "flags", 5) == 0;
    if (f)
        fclose(f);
    if (!found) {
        printf("SKIPPED: no flags in /proc/cpuinfo\n");
        return;
    }
    static const char *const avx2[] = {" avx2 ", " fma ", " f16c "};
    static const char *const avx512[] = {" avx512f ",  " avx512bw ",    " avx512vl ",
                                         " avx512dq ", " avx512_vnni ", " avx512vbmi "};
    line[strcspn(line, "\n")] = ' ';
    enum dn_isa want = DN_ISA_AVX512;
    for (int i = 0; i < 6; i++)
        want = strstr(line, avx512[i]) ? want : DN_ISA_AVX2;
    for (int i = 0; i < 3; i++)
        want = strstr(line, avx2[i]) ? want : DN_ISA_PORTABLE;
    cr_assert_eq(dn_isa_detect(), want, "%s", dn_isa_name(dn_isa_detect()));
}
