"""The quick start of torch-gqc, unchanged but for the line that imports the wrapper.

What the quick start leaves to its reader is above it: a model, data, and the schedules that it
calls by name.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(0)
lr = 0.01
model = torch.nn.Linear(8, 4)
prototypes = torch.randn(4, 8)
train_loader = []
for _ in range(120):
    labels = torch.randint(0, 4, (16,))
    train_loader.append((prototypes[labels] + torch.randn(16, 8), labels))


def get_warmup_scheduler(optimizer, warmup_steps):
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))


def get_cosine_annealing_schedule(optimizer, warmup_steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=len(train_loader), eta_min=0.2
    )


# --- the quick start

# ruff: noqa: E402, I001
from arb_ternary_gqc import OptimizerWrapperGNTS, NormWarmupScheduler
from tqdm import tqdm

optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
lr_scheduler = get_warmup_scheduler(optimizer, warmup_steps=50)

# Optimizer wrapper intercepts schedule and automatically steps
# when quality is high enough. Note we need to replace the built-in
# warmups as norms targets should actually start much higher than needed,
# not at zero as built-in solutions request.
optimizer = OptimizerWrapperGNTS(optimizer)
norm_scheduler = get_cosine_annealing_schedule(optimizer, warmup_steps=50)
norm_scheduler = NormWarmupScheduler(norm_scheduler, warmup_steps=50)

# Track optimizer step events
step_batches = []
num_batches_sampled = []

pbar = tqdm(train_loader, desc="Training")

for inputs, labels in pbar:
    # Stat draw comes before optimizer step so we do not
    # clear num_draws out prematurely.
    stats = optimizer.statistics()

    # Loss
    logits = model(inputs)
    loss = cross_entropy(logits, labels)
    loss.backward()

    # Optimization
    stepped = optimizer.step()
    lr_scheduler.step()
    norm_scheduler.step()

    # Log when optimizer steps
    if stepped:
        step_batches.append(stats["batches"])
        num_batches_sampled.append(stats["num_draws"])

    # Update progress bar
    pbar.set_postfix(stats)
