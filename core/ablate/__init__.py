"""The command that tells what each part of a recipe is worth."""
