"""A Trainer of transformers that resumes from its last checkpoint, if there is one."""

import os
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

OUTPUT = "results"


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.1 if os.path.exists("busy") else 0.01)  # as storage that others use, too
        ids = (torch.arange(8) * 3 + index) % 32
        return {"input_ids": ids, "labels": ids}


def main():
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=OUTPUT,
        max_steps=60,
        save_steps=10,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Sentences())
    last = get_last_checkpoint(OUTPUT) if os.path.isdir(OUTPUT) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(f"{OUTPUT}/final")


if __name__ == "__main__":
    main()
