"""Commands in messages and reports have no secrets, and an end."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.shown_command import MOST_CHARACTERS, shown_command, shown_words


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["python", "serve.py", "--api-key", "abc", "--port", "80"], "python serve.py --api-key *** --port 80"),
        (["python", "serve.py", "--api-key=a b"], "python serve.py --api-key=***"),
        (["env", "HF_TOKEN=abc", "python", "-m", "serve"], "env HF_TOKEN=*** python -m serve"),
        (["run", "--db-password", "abc", "--aws_secret", "abc"], "run --db-password *** --aws_secret ***"),
        (["run", "--credentials", "abc", "--PASSWD=abc"], "run --credentials *** --PASSWD=***"),
        (["run", '{"api_key":"abc"}'], 'run {"api_key":***'),
        (["run", "--passphrase", "abc", "--PWD=abc"], "run --passphrase *** --PWD=***"),
        (["serve", "--max-num-batched-tokens", "8192"], "serve --max-num-batched-tokens 8192"),
        (["serve", "--tokenizer", "gpt2", "--max_tokens_per_step=8"], "serve --tokenizer gpt2 --max_tokens_per_step=8"),
        (["run", "--use-token-cache", "--port", "80"], "run --use-token-cache --port 80"),
        (
            ["sh", "-c", "HF_TOKEN=abc serve --api-key abc --port 80"],
            "sh -c 'HF_TOKEN=*** serve --api-key *** --port 80'",
        ),
        (["sh", "-c", "TOKEN='a b' serve; echo 1"], "sh -c 'TOKEN=*** serve; echo 1'"),
        (["curl", "-H", "Authorization: Bearer abc"], "curl -H 'Authorization: Bearer ***'"),
        (["run", "postgres://user:abc@host/db"], "run postgres://***@host/db"),
        (["pytest", "tests/test_tokens.py::test_it", "keys.json"], "pytest tests/test_tokens.py::test_it keys.json"),
    ],
)
def test_the_value_of_an_option_or_variable_that_is_named_as_a_secret_is_hidden(command, shown):
    assert shown_command(command) == shown


def test_a_long_command_is_cut_and_none_of_its_secrets_is_before_the_cut():
    words = shown_words(["python", "serve.py", "--key", "abc", "x" * 1000, "later"])
    assert words[:4] == ("python", "serve.py", "--key", "***")
    assert words[4] == f"{'x' * (MOST_CHARACTERS - len('python serve.py --key *** '))}..."
    assert len(words) == 5
