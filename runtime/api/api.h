/* The OpenAI dialect on top of http/: what cli/serve.c plugs together.
 *
 * A request's path here: route (api.c) -> call (call.c): parse, authenticate, admit by policy, encode on a worker,
 * route by policy, submit -> events from the scheduler -> output (output.c): text, stop strings, JSON or SSE.
 */
#ifndef DN_API_API_H
#define DN_API_API_H

#include "api/node.h"

/* Registers the API's metric families. Before dn_http_run(). */
void dn_api_open(struct dn_node *node);
void dn_api_close(struct dn_node *node);

const struct dn_http_handler *dn_api_handler(void); /* user = the node */
struct dn_sink dn_api_sink(struct dn_node *node);   /* where the scheduler's events go */

#endif
