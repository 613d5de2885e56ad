"""Commands of `tccl` in this process, as tests call them."""

from typer.testing import CliRunner

from tccl_py.cli.main import app


def tccl(*words, **options):
    """What a command line printed, and its exit code."""
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def done(*words):
    """What a command line that must succeed printed."""
    result = tccl(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(result, sentence):
    """A command line was refused by one sentence that has these words."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr, result.stderr
