/* Lua: the one place that opens LuaJIT states. Policies, chat templates and the configuration run in them.
 *
 * A VM is one lua_State with the JIT off (compiled traces ignore hooks), the libraries base, table, string and math, an
 * allocator with a cap, and a budget of instructions and time for each dn_vm_call(). When a budget is spent the hook
 * fires again at every instruction, so that pcall can't swallow it. C functions can't be interrupted: untrusted code
 * therefore never sees Lua patterns, pcall or coroutines, and its slow functions look at the budget themselves.
 *
 * Two levels of trust share a VM. Host code (the embedded modules of lua/) sees the globals: the four libraries plus
 * require (embedded modules only) and load (text only), without io, os, debug, ffi, jit, package, dofile, loadfile,
 * loadstring, setfenv, getfenv, newproxy, collectgarbage and coroutine. Untrusted code gets a table made by
 * dn_vm_push_sandbox() as its environment. Methods of strings (("x"):rep(3)) come from the guarded string library for
 * both.
 *
 * The opener owns a VM; one thread at a time. lua.h may be included by runtime/script/, runtime/policy/ and
 * runtime/engine/template*.c. Functions named push leave one more value on the Lua stack.
 */
#ifndef DN_SCRIPT_VM_H
#define DN_SCRIPT_VM_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct lua_State;
struct dn_vm;

struct dn_vm_options {
    const char *name;      /* in messages: "policy", "template"; copied */
    enum dn_code code;     /* what a failing chunk or call returns: DN_POLICY, DN_TEMPLATE, DN_CONFIG */
    size_t memory_bytes;   /* cap of everything that Lua code allocates; 0: 8 MiB. LuaJIT does not collect when it hits
                              the cap   (live data should stay below half) */
    uint64_t instructions; /* a call's budget, rounded up to DN_VM_STEP; 0: 1,000,000 */
    uint64_t wall_ns;      /* a call's time, not counting what other threads took of it; 0: 100 ms. Checked every
                              DN_VM_STEP instructions */
};

#define DN_VM_STEP 1000

/* Why the last dn_vm_load/call/require failed; labels of metrics. */
enum dn_vm_failure {
    DN_VM_OK = 0,
    DN_VM_SYNTAX,       /* does not compile, or is bytecode */
    DN_VM_ERROR,        /* error() or a fault of the code, stack overflow included */
    DN_VM_MEMORY,       /* over memory_bytes */
    DN_VM_INSTRUCTIONS, /* over instructions */
    DN_VM_TIME          /* over wall_ns */
};

/* Opens a VM (about 80 us, 50 KB). -DN_NO_MEMORY if the cap is too small for the libraries. */
int dn_vm_open(struct dn_vm **out, const struct dn_vm_options *options, struct dn_err *err);
void dn_vm_close(struct dn_vm *vm); /* NULL is fine */

/* The state, for the few files that may include lua.h. Outside dn_vm_call() the cap is not enforced, so that pushing
 * arguments can't fail; never run Lua code on it by other means than dn_vm_call(). */
struct lua_State *dn_vm_lua(struct dn_vm *vm);

/* Changes the budgets of the following calls; 0 leaves a value as it is. */
void dn_vm_set_budget(struct dn_vm *vm, uint64_t instructions, uint64_t wall_ns);

/* Compiles a text chunk and pushes it as a function whose environment is the globals (host code) or, if `sandboxed`,
 * the table on top of the stack (which is popped in every case). chunk_name appears in messages ("policies/tiers.lua:3:
 * ..."). */
int dn_vm_load(struct dn_vm *vm, const char *source, size_t len, const char *chunk_name, bool sandboxed,
               struct dn_err *err);

/* Calls the function below its n_args arguments, as lua_pcall, within the budgets. Failure: nothing is left on the
 * stack, err->text is "place: reason", dn_vm_failure() and dn_vm_traceback() say more. err->code is options.code. After
 * any failure but DN_VM_ERROR all garbage is collected; the VM stays usable. A call inside a call shares the outer
 * one's budget. */
int dn_vm_call(struct dn_vm *vm, int n_args, int n_results, struct dn_err *err);

/* Pushes what the embedded module `name` returned ("dunlin.jinja" is lua/dunlin/jinja.lua or
 * lua/dunlin/jinja/init.lua); it runs once a VM. */
int dn_vm_require(struct dn_vm *vm, const char *name, struct dn_err *err);

/* Pushes a fresh environment for untrusted code: assert error ipairs next pairs select tonumber tostring type unpack,
 * and copies of math (no randomseed), table and the guarded string library. No metatable: the caller adds what it
 * offers and locks it. */
void dn_vm_push_sandbox(struct dn_vm *vm);

/* Pushes the guarded string library, the very table that methods of strings come from: byte char find (plain, whatever
 * the fourth argument says) format len lower rep (up to 64 KiB) reverse sub upper. The host may add its own guarded
 * match, gsub and so on before it makes a sandbox. */
void dn_vm_push_strings(struct dn_vm *vm);

enum dn_vm_failure dn_vm_failure(const struct dn_vm *vm);
const char *dn_vm_failure_name(enum dn_vm_failure failure); /* "instructions" */
const char *
dn_vm_traceback(const struct dn_vm *vm);     /* of the last DN_VM_ERROR or budget failure, or ""; until the next call */
size_t dn_vm_memory(const struct dn_vm *vm); /* bytes in use */

/* The Lua sources in the program (generated by lua/embed.cmake), ended by a NULL name. */
struct dn_vm_module {
    const char *name; /* "dunlin.jinja" */
    const char *path; /* "lua/dunlin/jinja/init.lua" */
    const char *source;
    size_t len;
};
extern const struct dn_vm_module dn_vm_modules[];

#endif
