"""HTTP: workers and router with an OpenAI API, the page, and what operators look at."""
