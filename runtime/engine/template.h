/* Chat templates: a message list becomes the prompt that the model was trained on.
 *
 * A template is Jinja text out of the model's files, so it is third-party input: lua/dunlin/jinja compiles it to Lua,
 * which runs in a VM with bounds on memory, instructions and time (script/vm.h). Nothing is guessed: a model without a
 * template has no chat.
 *
 * The rendered text comes with segments that say which bytes the template wrote and which came from the request; only
 * the former may become control tokens.
 *
 * A dn_template never changes once it is open: any number of threads may use it. A dn_template_vm belongs to one thread
 * at a time; it keeps the templates that it has compiled. close(NULL) is fine everywhere. Prompts are not logged.
 */
#ifndef DN_ENGINE_TEMPLATE_H
#define DN_ENGINE_TEMPLATE_H

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_template;
struct dn_template_vm;

/* A variable of the template with text that the host vouches for: bos_token, eos_token, pad_token, unk_token. */
struct dn_template_var {
    const char *name;
    const char *text;
};

/* How a template takes what requests may write in two ways; found out by trying at open. */
struct dn_template_traits {
    bool wants_argument_objects; /* tool_calls[].function.arguments: an object, not JSON text (GLM, Qwen2.5) */
    bool takes_content_parts;    /* content as a list of {type, text} parts; else they are joined to one string */
    bool wants_content_parts;    /* content only as such a list */
    char trial[DN_ERR_TEXT];     /* what the template said to one plain user message, or "": a refusal is no fault */
};

/* Compiles and tries a template. Errors: -DN_TEMPLATE with "template:LINE: reason" when it does not compile or does not
 * end within its bounds; source NULL or empty too. The source and the variables are copied. */
int dn_template_open(struct dn_template **out, const char *source, size_t len, const struct dn_template_var *vars,
                     size_t n_vars, struct dn_err *err);
void dn_template_close(struct dn_template *t);
const struct dn_template_traits *dn_template_traits(const struct dn_template *t);

int dn_template_vm_open(struct dn_template_vm **out, struct dn_err *err);
void dn_template_vm_close(struct dn_template_vm *vm);
void dn_template_vm_set_now(struct dn_template_vm *vm,
                            int64_t unix_s); /* what strftime_now() shows (UTC); 0: the clock */

struct dn_template_segment {
    size_t len; /* bytes, not 0 */
    bool trusted;
};

struct dn_template_output {
    struct dn_buf text;
    struct dn_template_segment *segment; /* their lengths add up to text.len; neighbours differ in trusted */
    size_t n_segments;
};
void dn_template_output_release(struct dn_template_output *out);

/* Renders. messages: array of objects; tools, kwargs: NULL or null for none; kwargs are further variables
 * (chat_template_kwargs) and may not replace the others. Null content becomes "", as does an assistant's missing
 * content; content parts and arguments are brought into the form that the template takes. Strings of the request are
 * untrusted, except a role out of OpenAI's list. Replaces what is in *out.
 *
 * Errors: -DN_TEMPLATE with "template:LINE: reason" if the template refuses the messages, -DN_INVALID_VALUE and
 * -DN_UNSUPPORTED_PARAM with err->param if they have the wrong shape. Never anything that a client can't mend. */
int dn_template_render(struct dn_template_vm *vm, const struct dn_template *t, const json_t *messages,
                       const json_t *tools, bool add_generation_prompt, const json_t *kwargs,
                       struct dn_template_output *out, struct dn_err *err);

#endif
