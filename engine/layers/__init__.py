"""What a decoder layer computes: products, row operations, and both fused for stock models."""
