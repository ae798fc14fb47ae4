"""The test-only recipe that makes SmolLM2 out of a GGUF file: is it the model it should be?"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.reference.loading import load_engine
from engines.reference.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import smollm2

TEXTS = (
    "The Eiffel Tower is located in Paris, the capital of France. It was built in 1889 and is one "
    "of the most visited monuments in the world.",
    "Photosynthesis is the process by which green plants use sunlight to make food from carbon "
    "dioxide and water. It takes place in the leaves.",
    "Once upon a time there was a little girl who lived in a small village near the forest. Every "
    "morning she walked to the river to fetch water for her mother.",
)
ANSWERS = (
    ("What is the capital of France?", "Paris"),
    ("What is 2 plus 2? Answer with the number.", "4"),
    ("Name the largest planet of the solar system.", "Jupiter"),
)


@given(heads=st.integers(1, 5), half=st.integers(1, 6), inner=st.integers(1, 4))
def test_rows_of_a_head_are_put_back(heads: int, half: int, inner: int) -> None:
    weight = torch.arange(heads * 2 * half * inner).view(heads * 2 * half, inner)
    # as llama.cpp's converter lays them: the two halves of a head, row by row in turns
    stored = weight.view(heads, 2, half, inner).transpose(1, 2).reshape(weight.shape)
    assert torch.equal(smollm2.unpermuted(stored, heads), weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.make(tmp_path_factory.mktemp("smollm2") / "target")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[tuple[object, object]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    yield (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.full
def test_english_is_no_surprise_to_it(model: tuple[object, object]) -> None:
    network, tokenizer = model
    losses, tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids  # type: ignore[operator]
        with torch.no_grad():
            loss = network(ids, labels=ids).loss  # type: ignore[operator]
        losses, tokens = losses + float(loss) * (ids.shape[1] - 1), tokens + ids.shape[1] - 1
    assert math.exp(losses / tokens) < 15  # unpermuted or wrongly rotated: thousands


@pytest.mark.full
def test_it_answers_and_the_reference_engine_answers_the_same(
    model: tuple[object, object], folder: Path
) -> None:
    network, tokenizer = model
    engine = load_engine(folder, max_len=256, slots=1)
    right = 0
    for question, answer in ANSWERS:
        text = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, return_tensors="pt").input_ids  # type: ignore[operator]
        written = network.generate(ids, max_new_tokens=40, do_sample=False)  # type: ignore[attr-defined]
        theirs = written[0, ids.shape[1] :].tolist()
        params = SamplingParams(max_tokens=40, temperature=0.0)
        assert engine.generate([ids[0].tolist()], params)[0].output == theirs
        right += answer in tokenizer.decode(theirs)  # type: ignore[attr-defined]
    assert right >= 2


@pytest.mark.full
def test_text_and_template_come_back(model: tuple[object, object]) -> None:
    _, tokenizer = model
    for text in (*TEXTS, "It's 2024: 3.14, naïve café — 漢字\n\n\tdef f(x):\n    return x"):
        ids = tokenizer.encode(text)  # type: ignore[attr-defined]
        assert tokenizer.decode(ids) == text  # type: ignore[attr-defined]
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024"))  # type: ignore[attr-defined]
    assert digits == ["2", "0", "2", "4"]
    chat = [{"role": "user", "content": "Hi"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    assert shown.endswith("<|im_start|>assistant\n")
    marks = tokenizer.encode("<|im_start|><|im_end|>")  # type: ignore[attr-defined]
    assert marks == [1, 2]
