"""Prompts for the engine tests: six whose answers repeat the prompt, six open-ended."""

COPYING = [
    "Give this function back unchanged:\n\ndef area(width, height):\n    result = width * height\n    return result\n\ndef volume(width, height, depth):\n    result = width * height * depth\n    return result\n",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Count from 1 to 40, one number a line.",
    'Write a JSON list of five people with the keys "name", "age" and "city".',
    "Rename x to total and give the code back:\n\nx = 0\nfor i in range(10):\n    x = x + i\nprint(x)\n",
    "Write the alphabet three times.",
]
OPEN = [
    "Tell me about the sea.",
    "Why is the sky blue?",
    "Write a short story about a fox and a crow.",
    "What should I cook for dinner tonight?",
    "Explain what a computer does to a child.",
    "Give me three tips for learning a language.",
]
ALL = COPYING + OPEN
