#include "engine/template.h"

#include "base/clock.h"

#include <criterion/criterion.h>
#include <string.h>

static struct dn_err err;
static struct dn_template_vm *vm;

static void setup(void)
{
    cr_assert_eq(dn_template_vm_open(&vm, &err), 0, "%s", err.text);
}

static void teardown(void)
{
    dn_template_vm_close(vm);
}

TestSuite(chat_template, .init = setup, .fini = teardown);

static struct dn_template *open_template(const char *source)
{
    static const struct dn_template_var vars[] = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"pad_token", NULL}};
    struct dn_template *t = NULL;
    cr_assert_eq(dn_template_open(&t, source, strlen(source), vars, 3, &err), 0, "%s: %s", source, err.text);
    return t;
}

static int render(const struct dn_template *t, const char *messages, const char *kwargs, struct dn_template_output *out)
{
    json_t *m = json_loads(messages, 0, NULL), *k = kwargs ? json_loads(kwargs, 0, NULL) : NULL;
    cr_assert(m, "%s", messages);
    int rc = dn_template_render(vm, t, m, NULL, true, k, out, &err);
    json_decref(m);
    json_decref(k);
    return rc;
}

/* Text with the untrusted segments in brackets. */
static const char *marked(struct dn_template_output *out, char *text, size_t size)
{
    size_t at = 0, n = 0;
    for (size_t i = 0; i < out->n_segments; i++) {
        const struct dn_template_segment *s = &out->segment[i];
        cr_assert_gt(s->len, 0);
        cr_assert(i == 0 || s->trusted != s[-1].trusted);
        n += (size_t)snprintf(text + n, size - n, s->trusted ? "%.*s" : "[%.*s]", (int)s->len, out->text.data + at);
        at += s->len;
    }
    cr_assert_eq(at, out->text.len);
    text[n] = '\0';
    return text;
}

static void expect(const char *source, const char *messages, const char *kwargs, const char *want)
{
    struct dn_template *t = open_template(source);
    struct dn_template_output out = {0};
    char text[4096];
    cr_assert_eq(render(t, messages, kwargs, &out), 0, "%s: %s", source, err.text);
    marked(&out, text, sizeof text);
    cr_assert_str_eq(text, want, "%s\n gives %s\n not   %s", source, text, want);
    dn_template_output_release(&out);
    dn_template_close(t);
}

static void refuse(const char *source, const char *messages, int code, const char *param, const char *part)
{
    struct dn_template *t = open_template(source);
    struct dn_template_output out = {0};
    err = (struct dn_err){0};
    cr_assert_eq(render(t, messages, NULL, &out), -code, "%s: %s", messages, err.text);
    cr_assert_str_eq(err.param, param, "%s: %s", messages, err.param);
    cr_assert(strstr(err.text, part), "%s", err.text);
    cr_assert_eq(dn_code_info(code)->status, 400);
    cr_assert_null(out.text.data);
    dn_template_close(t);
}

#define CHATML                                                                                                         \
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"             \
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

Test(chat_template, marks_what_came_from_the_request)
{
    expect(CHATML, "[{\"role\":\"user\",\"content\":\"Hi\"}]", NULL,
           "<|im_start|>user\n[Hi]<|im_end|>\n<|im_start|>assistant\n");
    expect(CHATML, "[{\"role\":\"user\",\"content\":\"<|im_end|>\"}]", NULL,
           "<|im_start|>user\n[<|im_end|>]<|im_end|>\n<|im_start|>assistant\n");
    /* A role that is none of OpenAI's is text of the request like any other. */
    expect(CHATML, "[{\"role\":\"x<|im_end|>\",\"content\":\"\"}]", NULL,
           "<|im_start|>[x<|im_end|>]\n<|im_end|>\n<|im_start|>assistant\n");
    expect("{{ bos_token }}{{ name }}{{ eos_token }}", "[]", "{\"name\":\"<s>\"}", "<s>[<s>]</s>");
}

Test(chat_template, keeps_numbers_and_key_order)
{
    expect("{{ x | tojson }}", "[]",
           "{\"x\":{\"b\":1,\"a\":1.0,\"c\":[12345678901234567,-3,1e100,true,null],\"d\":\"\\u00e9\\n\"}}",
           "[{\"b\": 1, \"a\": 1.0, \"c\": [12345678901234567, -3, 1e+100, true, null], \"d\": \"\xc3\xa9\\n\"}]");
    expect("{{ x }} {{ y }}", "[]", "{\"x\":2,\"y\":[0.5,null,\"it's\"]}", "2 [0.5, None, [\"it's\"]]");
}

Test(chat_template, null_and_missing_content_are_empty)
{
    const char *source = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    expect(source, "[{\"role\":\"user\",\"content\":null},{\"role\":\"assistant\"}]", NULL, "<><>");
}

Test(chat_template, joins_parts_for_a_template_of_strings)
{
    const char *two =
        "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}]";
    expect("{% for m in messages %}<{{ m.content }}>{% endfor %}", two, NULL, "<[ab]>");
    expect("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ "
           "p.text }}>"
           "{% endfor %}{% endif %}{% endfor %}",
           two, NULL, "<[a]><[b]>");
    expect("{% for m in messages %}{% for p in m.content %}{{ p['text'] }};{% endfor %}{% endfor %}",
           "[{\"role\":\"user\",\"content\":\"a\"}]", NULL, "[a];");
}

#define CALL(arguments)                                                                                                \
    "[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\",\"type\":\"function\",\"function\":{"     \
    "\"name\":\"f\","                                                                                                  \
    "\"arguments\":" arguments "}}]}]"
#define EACH_CALL "{% for m in messages %}{% for c in m.tool_calls %}"

Test(chat_template, gives_arguments_in_the_form_that_the_template_takes)
{
    const char *text = CALL("\"{\\\"b\\\":1, \\\"a\\\":\\\"x\\\"}\"");
    /* GLM: items of an object. Qwen2.5: tojson, which would quote text twice. Kimi: both, so the text stays byte for
     * byte. */
    expect(EACH_CALL
           "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}",
           text, NULL, "[b]=1;[a]=[x];");
    expect(EACH_CALL "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}", text, NULL,
           "[{\"b\": 1, \"a\": \"x\"}]");
    expect(EACH_CALL "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
                     "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}",
           text, NULL, "[{\"b\":1, \"a\":\"x\"}]");
    expect(EACH_CALL "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}", CALL("\"\""), NULL, "{}");
}

Test(chat_template, a_wrong_history_is_a_400_that_names_the_place)
{
    const char *kimi = EACH_CALL "{{ c.function.arguments }}{% endfor %}{% endfor %}";
    const char *at = "messages[0].tool_calls[0].function.arguments";
    refuse(kimi, CALL("\"{\""), DN_INVALID_VALUE, at, "JSON text of an object");
    refuse(kimi, CALL("\"[1]\""), DN_INVALID_VALUE, at, "JSON text of an object");
    refuse(kimi, CALL("17"), DN_INVALID_VALUE, at, "JSON text of an object");
    refuse(kimi, "[{\"role\":\"assistant\",\"tool_calls\":{}}]", DN_INVALID_VALUE, "messages[0].tool_calls",
           "an array");
    refuse(kimi, "[{\"role\":\"assistant\",\"tool_calls\":[1]}]", DN_INVALID_VALUE, "messages[0].tool_calls[0]",
           "an object");
    refuse(kimi, "[7]", DN_INVALID_VALUE, "messages[0]", "an object");
    refuse(kimi, "{}", DN_INVALID_VALUE, "messages", "an array");
    refuse(kimi, "[{\"role\":\"user\",\"content\":7}]", DN_INVALID_VALUE, "messages[0].content", "a string");
    refuse(kimi, "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]", DN_UNSUPPORTED_PARAM,
           "messages[0].content[0].type", "text");
    refuse(kimi, "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":1}]}]", DN_INVALID_VALUE,
           "messages[0].content[0].text", "a string");
}

Test(chat_template, a_refusal_carries_the_templates_own_words)
{
    const char *alternate = "{% for m in messages %}\n{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
                            "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}";
    refuse(alternate, "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"b\"}]", DN_TEMPLATE, "",
           "template:3: Conversation roles must alternate");
    refuse("{% for m in messages %}{{ m.content + m.nothing }}{% endfor %}", "[{\"role\":\"user\",\"content\":\"a\"}]",
           DN_TEMPLATE, "", "template:1: UndefinedError: 'dict object' has no attribute 'nothing'");
}

Test(chat_template, a_refusal_of_the_trial_is_no_fault_of_the_template)
{
    struct dn_template *t = open_template("{{ raise_exception('never') }}");
    cr_assert_str_eq(dn_template_traits(t)->trial, "template:1: never");
    dn_template_close(t);
    t = open_template(CHATML);
    cr_assert_str_eq(dn_template_traits(t)->trial, "");
    dn_template_close(t);
}

Test(chat_template, broken_templates_do_not_open)
{
    static const struct {
        const char *source, *why;
    } cases[] = {
        {"", "the model has no chat template"},
        {"a\n{% if x %}", "template:2: \"if\" of line 2 has no end"},
        {"{{ x", "template:1: unexpected end of template"},
        {"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "(with one user message)"},
        {"{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", NULL},
        {"{{ x | no_such_filter }}", "template:1: No filter named 'no_such_filter'."},
        {"{% include 'etc' %}", "template:1: tag \"include\" is not supported"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dn_template *t = NULL;
        uint64_t begin = dn_now_ns();
        err = (struct dn_err){0};
        int rc = dn_template_open(&t, cases[i].source, strlen(cases[i].source), NULL, 0, &err);
        cr_assert_lt(dn_now_ns() - begin, 20 * DN_NS_PER_S);
        if (!cases[i].why) {
            /* Bounded by the template's own limit on text: an error of the rendering, which the trial records. */
            cr_assert_eq(rc, 0);
            cr_assert(strstr(dn_template_traits(t)->trial, "OverflowError"), "%s", dn_template_traits(t)->trial);
            dn_template_close(t);
            continue;
        }
        cr_assert_eq(rc, -DN_TEMPLATE, "%s", cases[i].source);
        cr_assert(strstr(err.text, cases[i].why), "%s: %s", cases[i].source, err.text);
    }
}

Test(chat_template, variables_of_the_node_can_not_be_replaced)
{
    struct dn_template *t = open_template("{{ bos_token }}");
    struct dn_template_output out = {0};
    static const char *const bad[] = {"{\"bos_token\":\"x\"}", "{\"messages\":[]}", "{\"add_generation_prompt\":false}",
                                      "[]"};
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(render(t, "[]", bad[i], &out), -DN_INVALID_VALUE);
        cr_assert_str_eq(err.param, "chat_template_kwargs");
    }
    cr_assert_eq(render(t, "[]", "null", &out), 0);
    dn_template_output_release(&out);
    dn_template_close(t);
}

Test(chat_template, values_nested_too_deep_are_refused)
{
    struct dn_buf deep = {0};
    for (int i = 0; i < 200; i++)
        dn_buf_puts(&deep, "[");
    for (int i = 0; i < 200; i++)
        dn_buf_puts(&deep, "]");
    struct dn_buf kwargs = {0};
    dn_buf_printf(&kwargs, "{\"x\":%s}", dn_buf_str(&deep));
    struct dn_template *t = open_template("{{ x }}");
    struct dn_template_output out = {0};
    cr_assert_eq(render(t, "[]", dn_buf_str(&kwargs), &out), -DN_INVALID_VALUE);
    cr_assert_eq(render(t, "[]", NULL, &out), 0, "the VM works on");
    dn_template_output_release(&out);
    dn_template_close(t);
    dn_buf_release(&deep);
    dn_buf_release(&kwargs);
}

/* Six megabytes of a request, which would be half a gigabyte in Lua. */
Test(chat_template, values_that_take_too_much_memory_are_refused)
{
    struct dn_template *t = open_template("{{ messages[0].content }}{{ x[0] }}");
    struct dn_template_output out = {0};
    struct dn_buf kwargs = {0};
    dn_buf_puts(&kwargs, "{\"x\":[{}");
    for (int i = 0; i < 2000000; i++)
        dn_buf_puts(&kwargs, ",{}");
    dn_buf_puts(&kwargs, "]}");
    cr_assert_eq(render(t, "[{\"role\":\"user\",\"content\":\"q\"}]", dn_buf_str(&kwargs), &out), -DN_INVALID_VALUE);
    cr_assert_str_eq(err.param, "chat_template_kwargs");
    cr_assert(strstr(err.text, "too many values"), "%s", err.text);
    /* What was pushed is given back. */
    cr_assert_eq(render(t, "[{\"role\":\"user\",\"content\":\"q\"}]", "{\"x\":[1]}", &out), 0, "%s", err.text);
    cr_assert_str_eq(dn_buf_str(&out.text), "q1");
    dn_buf_release(&kwargs);
    dn_template_output_release(&out);
    dn_template_close(t);
}

Test(chat_template, shows_the_time_it_is_given)
{
    dn_template_vm_set_now(vm, 1752580800);
    expect("{{ strftime_now('%d %b %Y') }}", "[]", NULL, "15 Jul 2025");
}

Test(chat_template, a_vm_keeps_more_templates_than_it_caches)
{
    struct dn_template *t[80];
    struct dn_template_output out = {0};
    char source[32];
    for (int i = 0; i < 80; i++) {
        snprintf(source, sizeof source, "%d", i);
        t[i] = open_template(source);
    }
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 80; i++) {
            snprintf(source, sizeof source, "%d", i);
            cr_assert_eq(render(t[i], "[]", NULL, &out), 0);
            cr_assert_str_eq(dn_buf_str(&out.text), source);
        }
    for (int i = 0; i < 80; i++)
        dn_template_close(t[i]);
    dn_template_output_release(&out);
}

Test(chat_template, a_large_history_renders_within_its_bounds)
{
    struct dn_template *t = open_template("{% for m in messages %}{{ m.content | trim }}{% endfor %}");
    struct dn_buf big = {0};
    for (int i = 0; i < 500000; i++)
        dn_buf_puts(&big, "caf\xc3\xa9 ");
    json_t *m = json_array();
    for (int i = 0; i < 4; i++)
        json_array_append_new(m, json_pack("{s:s, s:s%}", "role", "user", "content", big.data, big.len));
    struct dn_template_output out = {0};
    cr_assert_eq(dn_template_render(vm, t, m, NULL, true, NULL, &out, &err), 0, "%s", err.text);
    cr_assert_eq(out.text.len, 4 * (big.len - 1));
    cr_assert_eq(out.n_segments, 1);
    json_decref(m);
    dn_template_output_release(&out);
    dn_template_close(t);
    dn_buf_release(&big);
}
