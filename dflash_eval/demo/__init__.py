"""The demo's two drafters for SmolLM2-135M-Instruct, and the script that trained them."""
