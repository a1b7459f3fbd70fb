"""DeepSeek Sparse Attention for PyTorch, written so that ``torch.compile`` makes it fast."""
