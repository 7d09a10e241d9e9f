"""`jaxformer chat`: a line in, an answer out; commands, ends, and ctrl-C, with a conversation that is no model."""

import dataclasses
import io
import sys

import pytest

from jaxformer import cli, conversation
from jaxformer.config import Config, ConfigError, ModelConfig, StackConfig, TaskConfig
from jaxformer.hf import workdirs


class Echo:
    """A conversation that repeats the user's turns; the turn "stop" is interrupted after its first piece."""

    made: list["Echo"] = []  # noqa: RUF012 (for the tests to look at)

    def __init__(self, model, system=""):
        self.system, self.turns, self.resets = system, [], 0
        self.options = model.config.decode
        self.made.append(self)

    def reset(self):
        self.resets += 1

    def reply(self, text):
        if text == "wrong":
            raise ConfigError("messages: got 'wrong', expected text; remove it")
        return self.pieces(text)

    def pieces(self, text):
        self.turns.append(text)
        for piece in (text[:2], text[2:]):
            yield piece
            if text == "stop":
                raise KeyboardInterrupt


CONFIG = Config(model=ModelConfig(decoder=StackConfig()), task=TaskConfig(name="dialogue"))


@dataclasses.dataclass(frozen=True)
class Model:
    """What the command reads of a model."""

    config: Config
    weights: None = None


class Keyboard(io.StringIO):
    """Lines that a person types; "^C" is ctrl-C in place of a line."""

    def isatty(self):
        return True

    def readline(self, *arguments):
        line = super().readline(*arguments)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


@pytest.fixture
def chat(monkeypatch, tmp_path, capsys):
    """Runs the command on typed or piped lines: (exit code, stdout, stderr, the conversation)."""
    monkeypatch.setattr(workdirs, "load", lambda path, which: Model(CONFIG))
    monkeypatch.setattr(conversation, "Conversation", Echo)

    def chat(text, *flags, typed=False):
        monkeypatch.setattr(sys, "stdin", (Keyboard if typed else io.StringIO)(text))
        code = cli.main(["chat", f"--workdir={tmp_path}", *flags])
        return code, *capsys.readouterr(), Echo.made[-1]

    return chat


def test_a_pipe_gets_one_answer_for_one_line(chat):
    code, out, err, talk = chat("hello\n\na\\b\r\nlast", "--system=be kind")
    assert (code, out, err) == (0, "hello\n\na\\b\nlast\n", "")
    assert talk.turns == ["hello", "a\\b", "last"]
    assert talk.system == "be kind"


def test_an_answer_of_several_lines_stays_one_on_a_pipe(chat, monkeypatch):
    monkeypatch.setattr(Echo, "pieces", lambda self, text: iter(["a\n", "b\r", "c"]))
    assert chat("x\n")[1] == "a\\nb\\rc\n"
    assert chat("x\n", typed=True)[1] == "a\nb\rc\n"


def test_commands_are_no_turns(chat):
    code, out, _, talk = chat("one\n/reset\ntwo /quit\n/quit\nthree\n")
    assert (code, out) == (0, "one\ntwo /quit\n")
    assert talk.resets == 1


def test_a_person_is_prompted_on_stderr_and_may_send_an_empty_line(chat):
    code, out, err, talk = chat("one\n\n", typed=True)
    assert (code, out, talk.turns) == (0, "one\n", ["one"])
    assert "/reset forgets the conversation, /quit ends" in err
    assert err.count("> ") == 3


def test_a_refused_turn_ends_a_pipe_and_not_a_conversation(chat):
    assert chat("wrong\nnext\n")[:3] == (2, "", "error: messages: got 'wrong', expected text; remove it\n")
    code, out, err, talk = chat("wrong\nnext\n", typed=True)
    assert (code, out, talk.turns) == (0, "next\n", ["next"])
    assert "error: messages: got 'wrong'" in err


@pytest.mark.parametrize("typed", [True, False])
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(chat, typed):
    code, out, err, talk = chat("stop\nmore\nstop\nlast\n", typed=typed)
    assert (code, out) == (0, "st\nmore\nst\nlast\n")
    assert talk.turns == ["stop", "more", "stop", "last"]
    assert err.count("stopped; ctrl-C again ends") == 2


def test_the_second_ctrl_c_in_a_row_ends(chat):
    with pytest.raises(KeyboardInterrupt):  # `console` makes exit code 130 of it
        chat("stop\n^C\nnever\n", typed=True)
    with pytest.raises(KeyboardInterrupt):
        chat("one\n^C\n^C\nnever\n", typed=True)
    assert Echo.made[-1].turns == ["one"]
    code, out, _, talk = chat("^C\none\n^C\ntwo\n", typed=True)
    assert (code, talk.turns) == (0, ["one", "two"])
    assert out.endswith("one\ntwo\n")


def test_options_are_those_of_decoding(chat):
    _, _, err, talk = chat("", "--config.decode.max_length=7", "--config.decode.method=sample")
    assert (talk.options.max_length, talk.options.method) == (7, "sample")
    assert err.startswith("changed: ")
    assert '"decode.max_length": {"run": 64, "here": 7}' in err
    assert "without effect on chat: config.data.length" in chat("", "--config.data.length=9")[2]
    code, _, err = chat("", "--config.train.steps=9")[:3]
    assert (code, err.count("\n")) == (2, 1)
    assert "chat: got --config.train.steps, which cannot change" in err
