"""A GRPO script for TRL, as its documentation writes them. It is read here and never run."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForImageTextToText
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
GROUP = 8


def accuracy_reward(completions, solution, **kwargs):
    return [float(truth in completion[0]["content"]) for completion, truth in zip(completions, solution, strict=True)]


def main():
    dataset = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")
    dataset = dataset.map(lambda example: {"prompt": example["problem"]})
    model = AutoModelForImageTextToText.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
    args = GRPOConfig(
        output_dir="runs",
        run_name="grpo-vl",
        learning_rate=1e-5,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        num_train_epochs=1,
        max_steps=400,
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=2 * 2,
        steps_per_generation=8,
        num_iterations=2,
        num_generations=GROUP,
        max_prompt_length=2048,
        max_completion_length=1024,
        beta=0.04,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dr_grpo",
        scale_rewards=False,
        mask_truncated_completions=True,
        temperature=0.9,
        top_p=0.95,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=10,
        save_steps=100,
        report_to=["tensorboard"],
        reward_weights=[1.0, 0.5],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        cache_implementation="static",
        seed=7,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[accuracy_reward, think_format_reward],
        args=args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
