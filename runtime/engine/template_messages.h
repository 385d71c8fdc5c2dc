/* Private to template*.c: brings the messages of a request into the form that a template takes. Any thread. */
#ifndef DN_ENGINE_TEMPLATE_MESSAGES_H
#define DN_ENGINE_TEMPLATE_MESSAGES_H

#include "engine/template.h"

/* *out: a new array (json_decref) whose messages are shared with `messages` where nothing changes. */
int dn_template_messages(const json_t *messages, const struct dn_template_traits *traits, json_t **out,
                         struct dn_err *err);

#endif
