"""Adapters in the format of the peft package: adapter_config.json and adapter_model.safetensors beside a base model.

The file holds, for a linear map NAME of the other library with `[out, in]` weights,

    base_model.model.NAME.lora_A.weight [r, in]       base_model.model.NAME.lora_B.weight [out, r]

and other trained tensors (`modules_to_save`) as base_model.model.NAME. The rows of a family say which of our kernels a
NAME is, and how its axes are arranged; A and B follow from the two halves of that pattern.

A map that is one tensor there and three kernels here (GPT-2's `c_attn`) is read as three adapters with equal A. If they
differ after training here, they are written as one adapter of three times the rank, which is exact: A stacked, and B
block-diagonal.
"""
