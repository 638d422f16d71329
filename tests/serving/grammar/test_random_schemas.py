"""Random schemas, outputs drawn at random: a validator that had no part in it accepts every one."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.structured import follows, random_schema
from serving.grammar.forms import json_grammar
from serving.grammar.grammars import Grammars
from serving.text.tokenizer import Tokenizer
from tests.serving.grammar.test_grammars import walk


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_what_follows_a_schema_is_valid(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    schema = random_schema(random.Random(seed))
    text = tokenizer.decode(walk(grammars.begin(json_grammar(schema)), tokenizer, seed, most=5000))
    assert follows(schema, text), text


def test_the_validator_tells_wrong_from_right() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert follows(schema, json.dumps({"a": 1}))
    assert not follows(schema, json.dumps({"a": "1"})) and not follows(schema, "{}") and not follows(schema, '{"a": 1')
