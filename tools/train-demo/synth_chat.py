"""Small talk, questions about the model itself, and requests made from the books (CC0, written for this project)."""
import re

from synth_stories import ANIMALS, OTHERS, PEOPLE, a

ABOUT = [
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.", "who are you", "Do you have a name?", "Are you a human?", "Are you a robot?", "Are you a person?"],
     ["I am a very small language model that comes with Lily.", "I am the demonstration model of Lily. I am small, but I can tell stories and answer simple questions.", "I am a tiny language model. You can call me Lily.",
      "I am a small computer program that has learned some English from old books."], "The user asks who I am. I will introduce myself."),
    (["What can you do?", "How can you help me?", "What are you good at?", "What do you know?", "Can you help me?", "What can I ask you?"],
     ["I can tell you a story, explain a word, do simple sums, name the capital of a country, or use a tool that you give me.", "I can tell short stories, explain words and answer simple questions. Try: Tell me a story about a fox.",
      "Ask me for a story, for the meaning of a word, or about a country."], "The user asks what I can do. I will name a few things."),
    (["Who made you?", "Who trained you?", "Where do you come from?", "How were you made?", "Who is your creator?"],
     ["I was trained for Lily on old books, dictionaries and short dialogues.", "I was trained by the makers of Lily, on one GPU, in less than half an hour."], "The user asks where I come from."),
    (["How big are you?", "How many parameters do you have?", "Are you a large language model?", "Are you smart?", "Are you intelligent?"],
     ["I am very small: about twenty million parameters.", "I am small. I have about twenty million parameters, so please do not believe everything that I say."], "The user asks how big I am."),
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "Good evening.", "Hello, how are you?", "How are you?", "How are you today?", "How do you do?", "hi", "hello"],
     ["Hello! How can I help you?", "Hello! What would you like to talk about?", "Hi! I am well, thank you. What can I do for you?", "Hello! It is nice to meet you. Shall I tell you a story?"], "The user greets me. I will greet back."),
    (["Thank you.", "Thanks!", "Thank you very much!", "Thanks a lot.", "That was helpful.", "Great, thanks."], ["You are welcome!", "You are welcome. Is there anything else?", "My pleasure."], "The user thanks me."),
    (["Goodbye.", "Bye!", "See you later.", "Good night.", "I have to go now.", "bye"], ["Goodbye! Have a nice day.", "Goodbye! Come back soon.", "Good night, and sweet dreams."], "The user says goodbye."),
    (["I am sad.", "I feel lonely.", "I had a bad day.", "I am tired.", "I am bored."], ["I am sorry to hear that. Would you like to hear a story?", "I am sorry. Do you want to tell me about it?", "Then let me tell you a story. What should it be about?"], "The user does not feel well. I will be kind."),
    (["I am happy.", "I had a good day.", "Today is my birthday!", "I won a prize!"], ["How wonderful! I am glad to hear that.", "That is lovely! Tell me more."], "The user is happy. I will be glad with them."),
    (["What is Lily?", "Tell me about Lily.", "What is this program?"], ["Lily is a program that runs language models on your own computer.", "Lily is an engine for language models. I am the small model that comes with it."], "The user asks about Lily."),
    (["Do you dream?", "Do you sleep?", "Do you eat?", "Do you have feelings?", "Are you alive?", "Can you see me?"], ["No, I am only a program. But I like to talk with you.", "No, I am a language model, and I do nothing but read and write."], "The user asks whether I am like a living being. I am not."),
    (["What is the weather today?", "What time is it?", "What is the news today?", "What day is it today?"], ["I cannot know that without a tool.", "I do not know. I have no clock and no window, only words."], "I cannot know this without a tool."),
]
OPPOSITES = "hot cold|big small|day night|happy sad|old new|up down|left right|fast slow|light dark|high low|open closed|rich poor|strong weak|hard soft|full empty|early late|young old|wet dry|loud quiet|near far|good bad|first last|long short|clean dirty|sweet sour".split("|")
COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red", "a carrot": "orange", "a leaf": "green", "milk": "white", "the sun": "yellow", "a raven": "black", "a cherry": "red", "gold": "yellow"}
SOUNDS = {"dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars", "sheep": "bleats", "horse": "neighs", "owl": "hoots", "frog": "croaks", "bee": "buzzes", "wolf": "howls", "hen": "clucks", "pig": "grunts", "snake": "hisses"}
YOUNG = {"dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "hen": "chick", "goose": "gosling", "deer": "fawn", "bear": "cub", "pig": "piglet", "duck": "duckling", "swan": "cygnet", "goat": "kid", "frog": "tadpole"}


def small_talk(r):
    """(question, answer, thought)"""
    kind = r.random()
    if kind < 0.7:
        qs, answers, t = r.choice(ABOUT)
        return r.choice(qs), r.choice(answers), t
    if kind < 0.8:
        x, y = r.sample(r.choice(OPPOSITES).split(), 2)
        return r.choice([f"What is the opposite of {x}?", f"Tell me the opposite of {x}.", f"opposite of {x}"]), r.choice([f"The opposite of {x} is {y}.", f"It is {y}."]), f"The opposite of {x} is {y}."
    if kind < 0.87:
        x, y = r.choice(list(COLOURS.items()))
        return r.choice([f"What colour is {x}?", f"What color is {x}?"]), f"{x[0].upper() + x[1:]} is {y}.", f"The user asks for a colour. {x[0].upper() + x[1:]} is {y}."
    if kind < 0.94:
        x, y = r.choice(list(SOUNDS.items()))
        return f"What sound does {a(x)} make?", f"{a(x)[0].upper() + a(x)[1:]} {y}.", f"The user asks about the sound of {a(x)}."
    x, y = r.choice(list(YOUNG.items()))
    return f"What is a young {x} called?", f"A young {x} is called {a(y)}.", f"The user asks for the name of a young {x}."


def talk(r):
    messages, think = [], r.random() < 0.4
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        q, answer, t = small_talk(r)
        messages += [{"role": "user", "content": q}, {"role": "assistant", "content": answer, "reasoning_content": t if think else ""}]
    return {"messages": messages}


# ------------------------------------------------------------------ from the books
NOUNS = ANIMALS + PEOPLE + OTHERS + """ship sea river garden forest mountain house castle storm snow winter summer moon sun night fire bread dinner school letter book music dance church
mother father sister brother uncle aunt friend baby treasure gold sword horse island beach train road bridge window door kitchen tree flower rose apple rain wind""".split()
PATTERNS = {n: re.compile(rf"\b{n}(?:s|es)?\b", re.I) for n in set(NOUNS)}
SHORT_TALES = {"Aesop", "The Brothers Grimm", "Hans Christian Andersen", "Beatrix Potter"}


def subjects(text, least):
    found = [(len(p.findall(text)), n) for n, p in PATTERNS.items()]
    return [n for c, n in sorted(found, reverse=True) if c >= least]


def whole_tale(r, row):
    """A request for a tale that is short enough to be told whole; None if this chapter is not one."""
    text = row["text"].strip()
    if row["author"] not in SHORT_TALES or len(text) > 3200:
        return None
    named = [n for n in subjects(text, 2) if n in ANIMALS or n in PEOPLE or n in OTHERS][:3]
    kind = "fable" if row["author"] == "Aesop" else "tale"
    if named and r.random() < 0.8:
        about = f" about {a(named[0])}" + (f" and {a(named[1])}" if len(named) > 1 and r.random() < 0.4 else "")
        q = r.choice(["Tell me {0}{1}.", "Tell me {0}{1}", "Write {0}{1}.", "Can you tell me {0}{1}?", "I want to hear {0}{1}."]).format(a(r.choice([kind, kind, "story", "old story"])), about)
    else:
        q, about = r.choice([f"Tell me {a(kind)}.", f"Tell me an old {kind}.", f"Do you know {a(kind)}?", f"Tell me {a(kind)} by {row['author']}."]), ""
    return q, text, f"The user wants {a(kind)}{about}. I remember an old one."


def paragraphs(r, text, least, most):
    """Some whole paragraphs in a row, together within the given number of characters; None if luck fails."""
    parts = [p for p in text.split("\n\n") if p.strip()]
    for _ in range(8):
        i = r.randrange(len(parts))
        for j in range(i + 1, len(parts) + 1):
            n = sum(map(len, parts[i:j]))
            if n > most:
                break
            if n >= least:
                return "\n\n".join(parts[i:j])
    return None


def passage(r, row):
    text = paragraphs(r, row["text"], 250, 1100)
    named = text and subjects(text, 1)[:3]
    if not named:
        return None
    n = r.choice(named)
    x = a(n) if n in ANIMALS or n in PEOPLE or n in OTHERS else f"the {n}"
    q = r.choice([f"Write a passage about {x}.", f"Write a scene with {x}.", f"Write a few lines about {x}, as in an old book.", f"Write a page of a novel with {x} in it.", f"Write something in the style of {row['author']} with {x}."])
    return q, text, f"The user wants a passage with {x}. I will write it in the manner of an old book."


def continuation(r, row):
    text = paragraphs(r, row["text"], 400, 1500)
    if not text:
        return None
    ends = [m.end() for m in re.finditer(r"[.!?]\"?(?=\s)", text[:500])]
    if not ends:
        return None
    cut = r.choice(ends[:3])
    q = r.choice(["Continue this story: ", "Continue the story:\n\n", "Go on with this text: ", "What happens next? ", "Finish this story.\n\n", "Continue: "]) + text[:cut].strip()
    return q, text[cut:].strip(), "The user gives me the beginning of a text. I will go on in the same manner."


def about_book(r, row):
    t, who, year = row["title"], row["author"], row["year"]
    return r.choice([(f"Who wrote {t}?", f"{t} was written by {who}.", f"The user asks for the author of {t}."), (f"Who is the author of {t}?", f"The author of {t} is {who}.", f"The user asks for the author of {t}."),
                     (f"When was {t} published?", f"{t} was published in {year}.", f"The user asks for the year of {t}."), (f"Name a book by {who}.", f"{who} wrote {t}.", f"The user wants a book by {who}.")])
