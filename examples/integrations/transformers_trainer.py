"""The Hugging Face Trainer: a small GPT-2 with random weights learns to count.

    kolovod run -np 2 -- python examples/integrations/transformers_trainer.py

Needs ``pip install 'kolovod[integrations]'``. Nothing is downloaded. The Trainer uses the process
group that is there, and shards the data by it.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, WORDS = 16, 31

torch.distributed.init_process_group("kolovod")  # before TrainingArguments, which take it over
set_seed(1)
starts = torch.randint(WORDS, (256, 1))
steps = torch.randint(1, 4, (256, 1))
texts = (starts + steps * torch.arange(LENGTH)) % WORDS  # for example 5, 7, 9, ...
data = [{"input_ids": text, "labels": text} for text in texts]
trained, held_out = data[:192], data[192:]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )
)  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=trained, eval_dataset=held_out)
    trainer.train()
    found = trainer.evaluate()["eval_loss"]

weights = sum(parameter.double().sum().item() for parameter in model.parameters())
print(
    f"rank {arguments.process_index} of {arguments.world_size}: loss {found:.3f} on other texts, "
    f"sum of weights {weights:.12f}"
)
torch.distributed.destroy_process_group()
