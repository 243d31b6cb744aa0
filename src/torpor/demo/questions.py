"""Eight fixed prompts, asked over and over; what counts is that the answers never change by a byte."""

QUESTIONS: tuple[str, ...] = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about winter sleep.",
    "What is 12 times 12?",
    "Give me one tip for growing tomatoes on a balcony.",
    "Which animal hibernates, and for how long?",
    "Translate 'good morning' into Spanish and Italian.",
)
