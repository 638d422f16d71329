"""--chat-template: a file or a template instead of the model's own, and one clear line where it is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import cli
from deploy.chat_template import read_chat_template
from deploy.cli import main
from serving.text.tokenizer import load_tokenizer
from tests.fakes.generate import ScriptedGenerate, app_of, calling, saying
from tests.tiny import write_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_a_file_or_a_template_is_read(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(str(file)) == read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [("/no/such/file.jinja", "No such file"), ("x" * 5000, "too long"), ("{% for %}", "not valid Jinja")],
)
def test_what_is_neither_is_one_clear_line(
    given: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)
    with pytest.raises(ValueError, match=said):
        read_chat_template(given)
    for command in ("serve", "router"):
        assert main([command, "/no/such/model", "--port", "0", "--chat-template", given]) == 2
        err = capsys.readouterr().err
        assert err.startswith("millrace: --chat-template: ") and said in err and err.count("\n") == 1


async def test_prompts_follow_the_template_that_was_given(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=384)
    tokenizer = load_tokenizer(tmp_path, TEMPLATE)
    assert load_tokenizer(tmp_path).chat_template != tokenizer.chat_template == TEMPLATE
    script = ScriptedGenerate(saying(tokenizer, "x"))
    async with calling(app_of(script, tokenizer)) as client:
        body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokenizer.decode(script.started[0].prompt) == "<system>Be brief.<user>Hi"
