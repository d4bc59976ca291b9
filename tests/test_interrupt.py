"""Ctrl-C: said at once, once, and not forgotten where an import swallows it."""

import signal

import pytest

from lab.interrupt import gentle_interrupt, import_interruptibly, told_interrupt


def press():
    signal.raise_signal(signal.SIGINT)


def test_the_first_is_told_and_the_second_raises(capsys):
    with pytest.raises(KeyboardInterrupt), gentle_interrupt("one moment") as interrupt:
        press()
        assert interrupt.wanted and capsys.readouterr().err == "one moment\n"
        press()
    assert capsys.readouterr().err == ""


def test_told_interrupts_raise_every_time(capsys):
    with told_interrupt("one moment") as interrupt:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                press()
    assert interrupt.count == 2 and capsys.readouterr().err == "one moment\n"
    with pytest.raises(KeyboardInterrupt):
        press()
    assert capsys.readouterr().err == ""  # closed, it is as before


def test_what_an_import_swallowed_is_raised_at_its_end(tmp_path, monkeypatch):
    (tmp_path / "swallows.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with told_interrupt("one moment"):
        assert import_interruptibly("json").__name__ == "json"
        with pytest.raises(KeyboardInterrupt):
            import_interruptibly("swallows")
        with gentle_interrupt() as inner:
            assert inner.wanted  # the loop that follows ends at its first look
        with pytest.raises(KeyboardInterrupt), gentle_interrupt():
            press()


def test_printing_to_a_stream_that_is_in_the_middle_of_a_line(monkeypatch, capfd):
    class Busy:
        def isatty(self):
            return True

        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr("sys.stderr", Busy())
    with gentle_interrupt("one moment"):
        press()
    monkeypatch.undo()
    assert capfd.readouterr().err == "\none moment\n"
