"""Commands in messages and reports have no secrets, and an end."""

from __future__ import annotations

from itertools import repeat

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
        (["sh", "-lc", "serve --api-key abc def --port 80"], "sh -lc 'serve --api-key *** --port 80'"),
        (["env", "TOKEN=abc def", "serve"], "env TOKEN=*** serve"),
        (["serve", "--api-key", "abc", "def", "--port", "80"], "serve --api-key *** *** --port 80"),
        (["serve", "--api-key", "abc", "-p", "80"], "serve --api-key *** -p 80"),
        (["run", "--password", "-abc", "--port", "80"], "run --password *** --port 80"),
        (["run", "--api-key", "12345", "--password=123"], "run --api-key *** --password=***"),
        (["run", "--pass", "abc", "--auth", "a:b"], "run --pass *** --auth ***"),
        (["run", "MYSQL_PWD=abc", "PGPASSWORD=abc", "SSHPASS=abc"], "run MYSQL_PWD=*** PGPASSWORD=*** SSHPASS=***"),
        (["run", "-DdbPassword=abc", "-eHF_TOKEN=abc"], "run -DdbPassword=*** -eHF_TOKEN=***"),
        (["run", "--env=HF_TOKEN=abc def"], "run --env=HF_TOKEN=***"),
        (["curl", "-H", "Authorization: Bearer abc"], "curl -H 'Authorization: Bearer ***'"),
        (["curl", "-H", "Authorization: Basic abc"], "curl -H 'Authorization: Basic ***'"),
        (["curl", "--header=Authorization: Bearer abc"], "curl '--header=Authorization: Bearer ***'"),
        (["curl", "-HAuthorization: Bearer abc"], "curl '-HAuthorization: Bearer ***'"),
        (["curl", "-HX-Api-Key:abc def"], "curl -HX-Api-Key:***"),
        (["sh", "-c", "curl -H 'X-Api-Key: abc def' host"], "sh -c \"curl -H 'X-Api-Key: ***' host\""),
        (
            ["docker", "--entrypoint=python serve.py --api-key abc"],
            "docker '--entrypoint=python serve.py --api-key ***'",
        ),
        (
            ["python", "-cfrom os import *; environ['TOKEN'] = 'a b'"],
            "python \"-cfrom os import *; environ['TOKEN'] = ***\"",
        ),
        (["python", "-c", "environ.setdefault('TOKEN', 'a b')"], "python -c \"environ.setdefault('TOKEN', ***\""),
        (["python", "-c", "get(auth=('a', 'b'), timeout=3)"], "python -c 'get(auth=*** timeout=3)'"),
        (["python", "-c", r"token = 'a\' b'; run()"], "python -c 'token = *** run()'"),
        (["python", "-c", "run(['serve', '--api-key', 'a b'])"], "python -c \"run(['serve', '--api-key', ***\""),
        (["run", '--json={"password" : "abc"}'], "run '--json={\"password\" : ***'"),
        (["run", "postgres://user:abc@host/db"], "run postgres://***@host/db"),
        (["run", "postgres://user:a/b@host/db", "https://abc@host"], "run postgres://***@host/db https://***@host"),
    ],
)
def test_the_value_of_an_option_or_variable_that_is_named_as_a_secret_is_hidden(command, shown):
    assert shown_command(command) == shown
    words = shown_words(command)
    assert shown_words(words) == words


@pytest.mark.parametrize("start", ["hf_", "sk-", "sk-proj-", "ghp_", "gho_", "github_pat_", "xoxb-", "AKIA"])
def test_a_token_with_a_known_start_is_hidden_anywhere(start):
    token = f"{start}{'A1B2' * 4}"
    assert shown_words(["run", token, f"--x={token}", f"cat /{token}/y"]) == ("run", "***", "--x=***", "cat /***/y")


@pytest.mark.parametrize(
    "words",
    [
        "serve --tokenizer gpt2 --max-num-batched-tokens 8192 --max-tokens 8 --max_tokens_per_step=8",
        "serve --num-key-value-heads 8 model --pad-token-id=0 --keypoints 3 --keyword x --ssl-keyfile x",
        "serve --use-token-cache --port 80 -cc.pass_config.fuse=true --author x",
        "pytest tests/test_tokens.py::test_it tests/token.py::test_it tests/test_token.py::test_it[key=3] keys.json",
        "pip git+https://host/user/package@main token://host hf_transformers task-specific-long-name-of-a-run",
    ],
)
def test_a_word_that_only_resembles_a_secret_is_shown(words):
    assert shown_words(words.split()) == tuple(words.split())


@pytest.mark.parametrize("part", ["a", "-", "key", "key=", "-key ", "://a:", "aB", "'", "[", "\\", "a ", " "])
def test_a_word_of_5_mb_costs_no_more_than_a_short_one(part):
    word = part * (5_000_000 // len(part))
    assert len(shown_command(["python", "-c", word])) < 2 * MOST_CHARACTERS
    assert len(shown_command(["python", word])) < 2 * MOST_CHARACTERS


def test_words_behind_the_cut_are_not_read():
    assert len(shown_words(repeat("word"))) == MOST_CHARACTERS // len("word ") + 1


def test_the_start_of_a_secret_at_the_end_of_the_read_text_is_not_shown():
    value = "x" * (4 * MOST_CHARACTERS - 50)
    assert shown_words(["sh", "-c", f"TOKEN={value} postgres://user:abc{'x' * 99}@host"]) == ("sh", "-c", "...")


def test_a_long_word_after_a_word_that_fills_the_text_is_cut():
    assert shown_words(["x" * MOST_CHARACTERS, "y" * 1000]) == ("x" * MOST_CHARACTERS, "...")


def test_a_long_command_is_cut_and_none_of_its_secrets_is_before_the_cut():
    words = shown_words(["python", "serve.py", "--key=abc", "x" * 1000, "later"])
    assert words[:3] == ("python", "serve.py", "--key=***")
    assert words[3] == f"{'x' * (MOST_CHARACTERS - len('python serve.py --key=*** '))}..."
    assert len(words) == 4
