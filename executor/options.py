"""How one run is carried out: what a person says beside the plan. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RunOptions(BaseModel):
    """Everything a training run needs that its plan does not say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path = Field(description="Hugging Face directory: config.json, a tokenizer, safetensors weights.")
    data: Path = Field(description="JSONL file, one document per line with a text or an input_ids field.")
    output_dir: Path = Field(description="Where metrics, checkpoints and the trained model go.")
    steps: int = Field(gt=0, description="Optimizer steps of the whole run, steps before a resume included.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak, reached after warm-up.")
    warmup_steps: int = Field(0, ge=0)
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_frac: float = Field(0.1, ge=0, le=1, description="Last learning rate as a share of the peak.")
    weight_decay: float = Field(0.1, ge=0, description="Applies to matrices; norms and biases are never decayed.")
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, ge=0, description="Clips the global gradient norm; 0 = never.")
    seed: int = Field(0, ge=0, description="Order of the data and random weights.")
    checkpoint_every: int = Field(0, ge=0, description="Steps between checkpoints; 0 = one at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    resume: bool = Field(False, description="Continue from the newest complete checkpoint in output_dir.")
    skip_bad_lines: bool = Field(False, description="Count malformed lines of the data instead of stopping.")
    text_field: str = Field("text", min_length=1, description="Field of a line that holds the document's text.")
    log_every: int = Field(1, gt=0, description="Steps between progress lines where there is no terminal.")
    init: Literal["pretrained", "random"] = Field("pretrained", description="Weights to start from.")

    @model_validator(mode="after")
    def _consistent(self) -> RunOptions:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is more than steps={self.steps}. Warm up for fewer steps."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and below 1.")
        return self
