"""The ablation lab: loads, measurements, designs and their statistics. Knows no part by name."""
