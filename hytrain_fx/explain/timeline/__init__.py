"""What ran when, measured and predicted: values, then pictures."""
