"""A Trainer of transformers as people write them: what it imports takes longer than all else of its restart."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * 3 + index) % 32
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="results",
        max_steps=1_000_000,
        save_strategy="no",
        logging_steps=10,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Sentences()).train()


if __name__ == "__main__":
    main()
