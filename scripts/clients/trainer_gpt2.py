"""The Hugging Face Trainer on a small GPT-2 with random weights, over the backend that is named.

    torchrun --nproc-per-node 2 trainer_gpt2.py kolovod FOLDER

Nothing is fetched: configuration, weights and text are made here.
"""

import sys

import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, WORDS, TEXTS = 32, 61, 160


class Texts(torch.utils.data.Dataset):
    """Progressions modulo a prime, with one of three steps: a model learns to go on with them."""

    def __init__(self, seed: int) -> None:
        draw = numpy.random.default_rng(seed)
        first = draw.integers(WORDS, size=(TEXTS, 1))
        step = draw.integers(1, 4, size=(TEXTS, 1))
        self.tokens = torch.tensor((first + step * numpy.arange(LENGTH)) % WORDS)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(backend: str, folder: str) -> None:
    torch.distributed.init_process_group(backend)
    set_seed(3)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=f"{folder}/output",
        use_cpu=True,
        num_train_epochs=8,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=3,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Texts(1),
        eval_dataset=Texts(2),
    )
    trainer.train()
    found = trainer.evaluate()
    state = trainer.model.state_dict()
    numpy.savez(
        f"{folder}/rank{arguments.process_index}.npz",
        backend=torch.distributed.get_backend(),
        size=arguments.world_size,
        loss=found["eval_loss"],
        **{f"weights.{name}": value.numpy() for name, value in state.items()},
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
