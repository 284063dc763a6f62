"""Tiny `transformers` checkpoints with random weights in every tensor, biases and norms included."""

import json
import warnings

import numpy as np

VOCAB = 300
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}


def hf_config(family, **changes):
    import transformers

    kind, sizes = {
        "llama": (transformers.LlamaConfig, LLAMA),
        "gpt2": (transformers.GPT2Config, GPT2),
        "bert": (transformers.BertConfig, BERT),
        "distilbert": (transformers.DistilBertConfig, DISTILBERT),
    }[family]
    # GPT-2's default special ids are above this vocabulary, and transformers warns.
    ids = {"bos_token_id": 0, "eos_token_id": 0} if family == "gpt2" else {}
    return kind(**{"vocab_size": VOCAB, **sizes, **ids, **changes})


def hf_model(family, head="lm", seed=0, **changes):
    """A `transformers` model in evaluation mode; head lm, score or None (the bare backbone)."""
    import torch
    import transformers

    auto = {
        "lm": transformers.AutoModelForCausalLM,
        "score": transformers.AutoModelForSequenceClassification,
        None: transformers.AutoModel,
    }[head]
    if head == "score":
        changes["num_labels"] = 1
    model = auto.from_config(hf_config(family, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.dim() == 1 and name.endswith("weight")  # of a norm
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if scale else 0.2 * noise)
    return model


def save(model, directory, **keys):
    """`save_pretrained`, then keys set in config.json (None removes one)."""
    model.save_pretrained(str(directory))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= keys
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


def torch_outputs(model, rows):
    """Of each row by itself, without padding: log-probabilities [T, V] or a score []."""
    import torch

    outputs = []
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0]
            score = logits.ndim == 1
            outputs.append((logits[0] if score else torch.log_softmax(logits.double(), -1)).numpy())
    return outputs


def log_softmax(logits):
    """In NumPy: compiles nothing."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def ragged(lengths=(5, 12, 9), seed=0, low=10):
    rng = np.random.default_rng(seed)
    return [rng.integers(low, VOCAB, n).tolist() for n in lengths]


def pad(rows, side, width=14, filler=7):
    """(tokens, mask), with real ids as padding."""
    tokens = np.full((len(rows), width), filler, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, where], mask[i, where] = row, True
    return tokens, mask


def tokenizer(eos="<eos>", pad=None, bos=None, template=None):
    """A byte-level tokenizer of about 260 entries."""
    import tokenizers
    import transformers

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    specials = [t for t in dict.fromkeys((eos, pad, bos)) if t]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["hello there, hello world"], trainer)
    with warnings.catch_warnings():
        made = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token=eos, pad_token=pad, bos_token=bos
        )
    made.chat_template = template
    return made
