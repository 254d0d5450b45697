"""The published models that tiny_model.py imitates, and whose real dimensions it holds."""

# Name on the Hub -> family and size.
PUBLISHED = {
    "openai/gpt-oss-20b": ("gpt-oss", "20b"),
    "openai/gpt-oss-120b": ("gpt-oss", "120b"),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", "1b"),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", "3b"),
    "meta-llama/Llama-3.1-8B": ("llama-base", "8b"),
    "Qwen/Qwen2.5-3B": ("qwen2", "3b"),
    "Qwen/Qwen3-8B": ("qwen3", "8b"),
    "Qwen/Qwen3.8-27B": ("qwen3_5", "27b"),
    "allenai/Olmo-3-7B-Instruct-SFT": ("olmo3", "7b"),
}
