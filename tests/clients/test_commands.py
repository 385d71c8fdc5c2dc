"""The command line: exit codes, what is wrong with a configuration and where, and dunlin chat."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from serve_lib import BINARY, ENV, SOURCE, WORK, Node, command, tiny_model, write

OK, FAILED, USAGE = 0, 1, 2

# (text of the file, what the message must hold); {f} is the file's path. Everything that is wrong is said at once.
CONFIGURATIONS = [
    ('return {\n  listn = "127.0.0.1:1" }', ['{f}:2: listn: unknown key (did you mean "listen"?)']),
    ('return { listen = "nope" }', ["{f}:1: listen", "expected HOST:PORT"]),
    ('return { listen = "0.0.0.0:8443" }', ["{f}:1: listen", "keys"]),
    ('return { cleartext = "0.0.0.0:80" }', ["{f}:1: cleartext", "loopback"]),
    ("return { limits = {\n header_fields = 5,\n header_byts = 3 } }",
     ["{f}:2: limits.header_fields = 5: expected an integer from 8 to 1000",
      '{f}:3: limits.header_byts: unknown key (did you mean "header_bytes"?)', "2 errors in 1 file"]),
    ('return { models = {\n ["a"] = { path = "x",\n kv_dtpye = "bf16" } } }',
     ['{f}:3: models["a"].kv_dtpye: unknown key (did you mean "kv_dtype"?)']),
    ('return { models = { a = { kv_dtype = "bf16" } } }', ['{f}:1: models["a"].path: missing']),
    ('return { models = { a = { path = "x", kv_dtype = "fp4" } } }', ["{f}:1:", "expected one of bf16, fp8_e4m3"]),
    ('return { models = { a = { path = "x" }, b = { path = "y" } } }', ["one model", "serve NAME"]),
    ('return { engine = { threads = os.execute("x") } }', ['{f}:1: "os" is not a value']),
    ("return { engine = { threads = 1 + 1 } }", ["{f}:1:"]),
    ('return { engine = { kv_memory = "many" } }', ["{f}:1: engine.kv_memory", "expected a size"]),
    ("return { engine = { step_tokens = 1e300 } }", ["{f}:1: engine.step_tokens"]),
    ("return { engine = 5 }", ["{f}:1: engine"]),
    ("return {\n\n", ["{f}:3:", "table of line 1 does not end"]),
    ("", ["{f}:1:", "return {"]),
    ("return 5", ["{f}:1: expected {"]),
    ("\x1bLua garbage", ["{f}:1:"]),
    ('return { integrity = "strong" }', ["{f}:1: integrity", "off, tag"]),
    ('return { policy = { list = { { fil = "x" } } } }', ['{f}:1: policy.list[1].fil', '(did you mean "file"?)']),
    ('return { policy = { list = { { file = "nothere.lua" } } } }', ["nothere.lua: No such file"]),
    ('return { keys = "nokeys.lua" }', ["nokeys.lua: No such file"]),
    ('return { tls = { cert = "a.pem" } }', ["{f}:1: tls", "cert and key"]),
    ('return { log = { level = "chatty" } }', ["{f}:1: log.level", "error, warn, info, debug"]),
    ('return { listen = "127.0.0.1:0",\nlisten = "127.0.0.1:1" }', ['{f}:2: "listen" is given twice']),
]


@pytest.mark.parametrize("text,words", CONFIGURATIONS, ids=lambda v: re.sub(r"\W+", "-", str(v))[7:40])
def test_a_wrong_configuration_is_refused_with_file_line_and_hint(text, words):
    path = write("broken.lua", text)
    models = [] if "models" in text else [tiny_model()]
    for check in ([], ["--check"]):
        done = command("serve", *models, "--conf", path, *check, timeout=20)
        assert done.returncode == USAGE, (done.returncode, done.stderr)
        assert done.stdout == ""
        for word in words:
            assert word.replace("{f}", path) in done.stderr, (word, done.stderr)
        assert "https://" not in done.stderr, "something was started"


FLAGS = [
    (["--thread", "2"], "did you mean --threads?"), (["--threads", "zero"], "--threads = zero"),
    (["--kv-memory", "1XB"], "--kv-memory = 1XB"), (["--log", "loud"], "--log = loud"),
    (["--weights", "fp16"], "command line: weights"), (["--kv-dtype", "fp16"], "command line: kv_dtype"),
    (["--ctx", "5"], "--ctx 5"), (["--listen", "0.0.0.0:0"], "dunlin key add"), (["--listen", "x"], "HOST:PORT"),
    (["--conf"], "--conf: expected FILE"), (["--check=1"], "takes no value"), (["second-model"], "second-model"),
    (["--conf", "no-such-file"], "no-such-file: No such file"), (["--keys", "no-such-file"], "no-such-file"),
]


@pytest.mark.parametrize("flags,word", FLAGS, ids=lambda v: str(v)[:24])
def test_a_wrong_flag_is_refused_with_a_hint(flags, word):
    done = command("serve", tiny_model(), *flags, timeout=20)
    assert done.returncode == USAGE and word in done.stderr and "https://" not in done.stderr, done.stderr


def test_a_right_configuration_passes_its_check_and_starts_nothing():
    path = write("right.lua", 'return { listen = "127.0.0.1:0", engine = { threads = 1 } }')
    done = command("serve", tiny_model(), "--conf", path, "--check")
    assert done.returncode == OK and "fine" in done.stderr and "https://" not in done.stderr, done.stderr


def test_flags_win_over_the_file():
    with Node("--threads", "1", "--kv-memory", "2MiB", "--ctx", "512", "--log", "error",
              conf='  engine = { kv_memory = "8 MiB", threads = 2 },\n  log = { level = "debug" },') as node:
        assert node.post("/tokenize", {"prompt": "a"}).json()["max_model_len"] == 512
        page = node.page_tokens()
        assert f'dunlin_cache_config_info{{page_tokens="{page}",pages="{8192 // page}"}}' in node.metrics()
        assert node.text(temperature=0)
        assert "request.done" not in node.log()


def test_what_is_wrong_with_a_model_file_is_said():
    for name, text in (("empty.gguf", ""), ("text.gguf", "GGUF?" * 100), ("cut.gguf", "GGUF\x03\x00\x00\x00")):
        done = command("serve", write(name, text), "--check")
        assert done.returncode == FAILED and name in done.stderr, done.stderr
    assert command("serve", "nowhere.gguf", "--check").returncode == FAILED
    os.makedirs(os.path.join(WORK, "empty-folder"), exist_ok=True)
    done = command("serve", "empty-folder", "--check")
    assert done.returncode == FAILED and "config.json" in done.stderr, done.stderr


def test_unknown_commands_get_a_suggestion():
    for word, meant in (("serv", "serve"), ("generat", "generate"), ("chatt", "chat"), ("polcy", "policy")):
        done = command(word)
        assert done.returncode == USAGE and f'did you mean "{meant}"?' in done.stderr
    done = command("frobnicate")
    assert done.returncode == USAGE and "did you mean" not in done.stderr and "dunlin help" in done.stderr


def test_help_is_one_screen_on_stdout():
    for args in ([], ["help"], ["--help"], ["-h"]):
        done = command(*args)
        assert done.returncode == OK and done.stderr == "" and len(done.stdout.splitlines()) <= 30
        assert max(map(len, done.stdout.splitlines())) <= 100
    for name in ("serve", "chat", "generate", "bench", "show", "policy", "key", "tiny"):
        assert name in command("help").stdout, name
        done = command(name, "--help")
        assert done.returncode == OK and f"dunlin {name}" in done.stdout, (name, done.stderr)
    assert "body_bytes" in command("help", "conf").stdout and "kv_integrity" in command("help", "errors").stdout
    assert re.fullmatch(r"dunlin \d+\.\d+\.\d+\n", command("--version").stdout)
    assert command("help", "nothing").returncode == USAGE


def test_a_port_that_is_taken_is_an_error_with_the_address():
    with Node() as node:
        done = command("serve", tiny_model(), "--listen", f"127.0.0.1:{node.port}", timeout=20)
        assert done.returncode == FAILED and str(node.port) in done.stderr, (done.returncode, done.stderr)


def test_policies_are_checked_shown_and_explained():
    shipped = [os.path.join(SOURCE, "policies", n) for n in ("wishes.lua", "tiers.lua", "pressure.lua")]
    assert command("policy", "check", *shipped).returncode == OK
    listed = json.loads(command("policy", "show", "--json", *shipped).stdout)
    assert all(name in json.dumps(listed) for name in ("wishes", "tiers", "pressure", "burst_s"))
    done = command("policy", "explain", *shipped, '{"tenant": "acme", "labels": {"tier": "gold"}}')
    assert done.returncode == OK and "tiers" in done.stdout and "gold" in done.stdout, done.stderr
    broken = write("broken-policy.lua", "return {\n api = 1, nme = 5 }")
    done = command("policy", "check", shipped[0], broken)
    assert done.returncode == FAILED and broken in done.stderr, done
    assert command("policy", "check", "nowhere.lua").returncode == FAILED
    for args in ([], ["check"], ["frobnicate", shipped[0]]):
        assert command("policy", *args).returncode == USAGE


def test_show_and_doctor_tell_what_is_there():
    done = command("show", tiny_model())
    assert done.returncode == OK and "llama" in done.stdout, done
    assert "im_start" in command("show", "template", tiny_model()).stdout
    path = write("shown.lua", 'return { engine = { threads = 3 } }')
    config = command("show", "config", "--conf", path)
    assert config.returncode == OK and re.search(rf"engine\.threads\s.*3.*{re.escape(path)}:1", config.stdout), config.stdout
    json.loads(command("show", tiny_model(), "--json").stdout)
    assert command("show", "nowhere.gguf").returncode == FAILED and command("show").returncode == USAGE
    assert command("doctor").stdout


def test_the_configuration_that_is_shipped_is_right():
    done = command("serve", tiny_model(), "--conf", os.path.join(SOURCE, "conf/node.lua"), "--check", cwd=SOURCE)
    assert done.returncode == OK, done.stderr


# ---- generate and chat


def test_generate_says_what_the_server_says():
    with Node() as node:
        expected = node.text("the sea", temperature=0, max_tokens=24, ignore_eos=False)
    done = command("generate", tiny_model(), "the sea", "--max-tokens", "24", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (OK, expected + "\n", "")
    assert command("generate", tiny_model(), "--max-tokens", "24", input="the sea").stdout == expected + "\n"
    assert command("generate", tiny_model(), "the", "sea").returncode == USAGE


def test_chat_says_what_the_server_says():
    with Node() as node:
        expected = node.chat("hi", temperature=0, max_tokens=24)["choices"][0]["message"]["content"]
    done = command("chat", tiny_model(), "-p", "hi", "--temperature", "0", "--max-tokens", "24", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (OK, expected + "\n", "")
    piped = command("chat", tiny_model(), "--temperature", "0", "--max-tokens", "24", input="hi\n")
    assert (piped.returncode, piped.stdout) == (OK, expected + "\n")
    verbose = command("chat", tiny_model(), "-p", "hi", "--max-tokens", "9", "--verbose")
    assert verbose.returncode == OK and re.search(r"prompt \d+ tokens .* tok/s", verbose.stderr), verbose.stderr
    other = command("chat", tiny_model(), "-p", "hi", "--system", "the sea", "--temperature", "0", "--max-tokens", "24")
    assert other.stdout != done.stdout
    same = [command("chat", tiny_model(), "-p", "hi", "--seed", "5", "--max-tokens", "24").stdout for _ in range(2)]
    assert same[0] == same[1]


def test_chat_names_what_is_wrong():
    for args, code, word in ((["nowhere.gguf", "-p", "x"], FAILED, "nowhere.gguf"), ([], USAGE, "MODEL"),
                             ([tiny_model(), "-p"], USAGE, "-p"), ([tiny_model(), "x y"], USAGE, "MODEL"),
                             ([tiny_model(), "-p", "x", "--temperature", "hot"], USAGE, "--temperature hot"),
                             ([tiny_model(), "-p", "x", "--max-tokens", "0"], USAGE, "--max-tokens"),
                             ([tiny_model(), "-p", "x", "--sed", "1"], USAGE, "did you mean --seed?"),
                             ([tiny_model()], USAGE, "stdin"),
                             ([tiny_model(), "-p", "x" * 9000, "--ctx", "64"], FAILED, "context 64")):
        done = command("chat", *args)
        assert done.returncode == code and word in done.stderr, (args, done.returncode, done.stderr)
        assert done.stdout == ""
    bad = subprocess.run([BINARY, "chat", tiny_model(), "--quiet"], input=b"\xff\xfe", capture_output=True, env=ENV,
                         timeout=30, check=False)
    assert bad.returncode == FAILED and b"UTF-8" in bad.stderr


class Terminal:
    """dunlin chat on a terminal."""

    def __init__(self, *args):
        self.master, slave = pty.openpty()
        self.proc = subprocess.Popen([BINARY, "chat", *args], stdin=slave, stdout=slave, stderr=slave, env=ENV,
                                     start_new_session=True)
        os.close(slave)
        self.text = ""

    def read(self, until, timeout=30):
        """Reads until the text appears; what came since the last call."""
        end = time.monotonic() + timeout
        while until not in self.text:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], f"no {until!r} in {self.text!r}"
            try:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"ended before {until!r}: {self.text!r}") from None
        at = self.text.index(until) + len(until)
        taken, self.text = self.text[:at], self.text[at:]
        return taken

    def say(self, line):
        os.write(self.master, line.encode() + b"\n")
        self.read(line)

    def end(self):
        code = self.proc.wait(10)
        os.close(self.master)
        return code


def test_a_conversation_keeps_its_history_until_reset():
    t = Terminal(tiny_model(), "--temperature", "0", "--max-tokens", "12", "--quiet", "--verbose")
    t.read("> ")
    answers, prompts = [], []
    for line in ("hi", "hi", "/reset", "hi"):
        t.say(line)
        out = t.read("> ")
        if line == "/reset":
            assert "anew" in out
            continue
        prompts.append(int(re.search(r"prompt (\d+) tokens", out).group(1)))
        answers.append(out.split("prompt")[0])
    assert prompts[1] > prompts[0] == prompts[2] and answers[1] != answers[0] == answers[2]
    t.say("/what")
    assert "/quit" in t.read("> ")
    t.say("/quit")
    assert t.end() == OK


def test_ctrl_c_stops_the_answer_and_not_the_program():
    t = Terminal(tiny_model(), "--temperature", "1", "--seed", "3", "--quiet", "--verbose", "--weights", "bf16")
    t.read("> ")
    t.proc.send_signal(signal.SIGINT) # while it waits for a line
    t.read("> ")
    for _ in range(2):
        t.say("the sea")
        t.read(" ")
        t.proc.send_signal(signal.SIGINT)
        t.read("> ")
    os.write(t.master, b"\x04") # Ctrl-D
    assert t.end() == OK


def test_bench_refuses_what_is_longer_than_the_context():
    for flags in (("--what", "prefill", "--prompt", "6000"), ("--what", "decode", "--output", "6000", "--batch", "1")):
        done = command("bench", tiny_model(), "--rounds", "1", *flags)
        assert done.returncode == 1 and "the context is 4096" in done.stderr, (done.returncode, done.stderr)
    done = command("bench", tiny_model(), "--rounds", "1", "--prompt", "64", "--output", "8", "--batch", "2", "--csv", "/dev/stdout")
    assert done.returncode == 0 and len([l for l in done.stdout.splitlines() if l.count(",") == 11]) == 3, done.stderr
