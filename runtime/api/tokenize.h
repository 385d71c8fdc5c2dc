/* POST /tokenize and /detokenize, in vLLM's form. Work is done on a worker; on the request's loop otherwise. */
#ifndef DN_API_TOKENIZE_H
#define DN_API_TOKENIZE_H

#include "api/loop.h"

void dn_tokenize_begin(struct dn_api_loop *loop, struct dn_http_req *req); /* {prompt | messages} -> {count, tokens} */
void dn_detokenize_begin(struct dn_api_loop *loop, struct dn_http_req *req); /* {tokens} -> {prompt} */

#endif
