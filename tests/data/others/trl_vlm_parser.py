"""A GRPO script for TRL in the form of its own examples: all settings come from the command line. Never run here."""

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    training_args.model_init_kwargs = dict(  # noqa: C408, as TRL writes it
        revision=model_args.model_revision, attn_implementation=model_args.attn_implementation, dtype=dtype
    )

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config, split="train")
    dataset = dataset.train_test_split(test_size=100, seed=42)
    dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})

    train_dataset = dataset["train"]
    eval_dataset = dataset["test"] if training_args.eval_strategy != "no" else None

    def accuracy_reward(completions, solution, **kwargs):
        pairs = zip(completions, solution, strict=True)
        return [float(truth in completion[0]["content"]) for completion, truth in pairs]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
