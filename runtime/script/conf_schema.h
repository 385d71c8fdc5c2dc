/* Private to runtime/script/conf*.c: the schema of conf/node.lua. */
#ifndef DN_SCRIPT_CONF_SCHEMA_H
#define DN_SCRIPT_CONF_SCHEMA_H

#include "script/conf.h"
#include "script/literal.h"

enum dn_conf_type {
    DN_CONF_T_STRING,  /* const char * */
    DN_CONF_T_CHOICE,  /* const char *, one of `choices` */
    DN_CONF_T_ADDRESS, /* const char *, HOST:PORT */
    DN_CONF_T_ADDRESS_OR_FALSE,
    DN_CONF_T_BOOL,   /* bool */
    DN_CONF_T_INT,    /* uint64_t; "auto" is 0 where the default says so */
    DN_CONF_T_NUMBER, /* double */
    DN_CONF_T_SIZE,   /* uint64_t bytes; a number or "64 MiB" */
    DN_CONF_T_PARAMS, /* the params of a policy */
};

/* Which struct a row's offset is in, told by the path: "models.*.", "policy.list[]." or the rest. */
enum dn_conf_scope { DN_CONF_NODE, DN_CONF_MODEL, DN_CONF_POLICY };

struct dn_conf_row {
    const char *path; /* "limits.body_bytes" */
    enum dn_conf_type type;
    enum dn_conf_scope scope;
    size_t offset;
    double min, max;
    const char *choices;  /* "bf16 fp8" */
    const char *fallback; /* the default as one writes it on the command line; NULL: must be given */
    const char *help;
};

struct dn_conf_origin {
    const char *what; /* "conf/node.lua:12", "--listen"; NULL: default */
};

extern const struct dn_conf_row dn_conf_rows[];
extern const size_t dn_conf_n_rows;

struct dn_conf_section {
    const char *path; /* "limits", "models", "policy.list"; "": top level */
    const char *help;
};
extern const struct dn_conf_section dn_conf_sections[];
extern const size_t dn_conf_n_sections;

const struct dn_conf_row *dn_conf_row_find(const char *path);

/* The bit of a model's or policy's row in its `given`. */
uint32_t dn_conf_row_bit(const struct dn_conf_row *row);

/* Writes a value into base. place is what messages call it. Error: DN_CONFIG with "<place> = <value>: expected ...". */
int dn_conf_put_text(struct dn_conf *c, const struct dn_conf_row *row, void *base, const char *place, const char *text,
                     struct dn_err *err);
int dn_conf_put_literal(struct dn_conf *c, const struct dn_conf_row *row, void *base, const char *place,
                        const struct dn_literal *v, struct dn_err *err);

void dn_conf_print_value(const struct dn_conf_row *row, const void *base, struct dn_buf *out); /* as in the file */
void dn_conf_print_expected(const struct dn_conf_row *row, struct dn_buf *out); /* "an integer from 1 to 64" */

/* The word of the list that is nearest to what was written, or NULL if none is near. */
const char *dn_conf_nearest(const char *wrong, const char *const *word, size_t n);

#endif
