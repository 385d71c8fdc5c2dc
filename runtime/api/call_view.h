/* What policies see of a call: copies its request into the flat view of policy/view.h. On the call's loop. */
#ifndef DN_API_CALL_VIEW_H
#define DN_API_CALL_VIEW_H

#include "api/call.h"

enum { DN_CALL_PAIRS = 16, DN_CALL_HEADER_BYTES = 1024 };

/* The view and what it borrows; valid as long as the call. */
struct dn_call_view {
    struct dn_request_view request;
    struct dn_view_pair metadata[DN_CALL_PAIRS], header[DN_CALL_PAIRS], label[DN_CALL_PAIRS];
    char header_text[DN_CALL_PAIRS][DN_CALL_HEADER_BYTES + 1];
};
void dn_call_view(const struct dn_call *c, struct dn_call_view *v);

/* What became of it, for the finish hook. */
void dn_call_result_view(const struct dn_call *c, uint64_t now_ns, struct dn_result_view *r);

#endif
