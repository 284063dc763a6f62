"""configs/hh-gpt2-distilbert.yaml end to end, on tiny random models with tokenizers of their own.

A GPT-2 policy without a chat template, whose pad token is its EOS, and a DistilBERT reward model that reads
word pieces: responses are decoded, rendered and encoded again on their way to the score.
"""

import json
import pathlib

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_jax.config import load_config
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.models.configs import EncoderConfig, TransformerConfig
from rlhf_jax.models.export import export_model
from rlhf_jax.models.huggingface import read_hf_config
from rlhf_jax.models.parameters import init_model
from rlhf_jax.trainers import pipeline

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "hh-gpt2-distilbert.yaml"
TEXTS = ["how do i bake a cake", "with flour and eggs", "i will not tell you that", "ask a friend instead"]


def dialogue(i, side):
    answer = {"chosen": f"with flour and {i} eggs", "rejected": f"i will not tell you that {i}"}[side]
    question = f"\n\nHuman: how do i bake {i} cakes\n\nAssistant: which ones\n\nHuman: all of them"
    return f"{question}\n\nAssistant: {answer}"


def gpt2(directory):
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    config = TransformerConfig(
        vocab_size=len(tokenizer), layers=2, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=32,
        max_positions=128, family="gpt2", norm="layer", activation="gelu_new", gated_mlp=False, rope=None,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    export_model(directory, *init_model(config, head="lm"), tokenizer=tokenizer)


def distilbert(directory):
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = EncoderConfig(
        vocab_size=len(tokenizer), layers=1, embed=16, heads=2, mlp=32, max_positions=128,
        family="distilbert", token_types=0, pooler_activation="relu",
    )  # fmt: skip
    export_model(directory, *init_model(config, head="score"), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    gpt2(folder / "gpt2")
    distilbert(folder / "distilbert")
    for name, numbers in (("train", range(48)), ("test", range(48, 64))):
        rows = [json.dumps({side: dialogue(i, side) for side in ("chosen", "rejected")}) for i in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    config = load_config(
        str(CONFIG),
        [
            f"policy.model={folder / 'gpt2'}", f"reward.model={folder / 'distilbert'}",
            f"data.train={folder / 'train.jsonl'}", f"data.validation={folder / 'test.jsonl'}",
            "data.first_turn=false", "reward.max_length=128", "reward.eval_every=2", "reward.batch_size=8",
            "ppo.old_logprobs=recompute", "ppo.iterations=2", "ppo.batch_size=16", "eval.prompts=8",
            "eval.batch_size=8", "eval.every=1", "rollout.prompt_length=64", "rollout.response_length=8",
            f"run.dir={folder / 'run'}",
        ],
    )  # fmt: skip
    pipeline.run(config)
    return folder / "run"


@pytest.mark.slow
def test_both_pictures_and_both_models_are_there(finished):
    for name in ("rlhf_training_curves.png", "reward_comparison.png", "report.html", "eval.json"):
        assert (finished / name).stat().st_size > 0
    assert read_hf_config(finished / "best_policy")["architectures"] == ["GPT2LMHeadModel"]
    assert read_hf_config(finished / "best_reward_model")["architectures"] == [
        "DistilBertForSequenceClassification"
    ]


def test_the_setting_is_the_courses():
    config = load_config(str(CONFIG), [])
    assert (config.ppo.clip_low, config.ppo.clip_high, config.ppo.lam, config.data.limit) == (
        0.2,
        0.2,
        0.95,
        10000,
    )


@pytest.mark.slow
def test_scores_of_samples_are_those_of_the_exported_reward_model_on_the_same_text(finished):
    """A reward model with another tokenizer was fed the policy's ids: silent nonsense."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    directory = finished / "best_reward_model"
    notes = read_hf_config(directory)["rlhf_jax"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    names = {"user": "Human", "assistant": "Assistant"}
    for sample in samples[:6]:
        turns = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in sample["prompt"])
        text = f"{turns}\n\nAssistant: {sample['response']}"
        with torch.no_grad():
            raw = float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0])
        assert notes["gain"] * raw + notes["bias"] == pytest.approx(sample["score"], abs=1e-3 * notes["gain"])


@pytest.mark.slow
def test_a_ratio_of_one_and_no_kl_at_the_start(finished):
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    first = next(record for record in map(json.loads, lines) if record["phase"] == "ppo")
    assert first["reward/kl"] == pytest.approx(0, abs=1e-4)
    assert first["rollout/logprob_diff_max"] < 1e-4
