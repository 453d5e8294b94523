"""Made-up dialogues in which the assistant calls tools (or rightly does not).

Every dialogue is {"messages": [...], "tools": [...]} in OpenAI form; the chat template turns calls into Qwen's
XML. Tool names, parameter names, types, descriptions and the user's wording are drawn at random so that the model has
to copy them from the system turn. Results of sums and conversions are computed; weather, times and search hits are
invented. Everything here is written for this project (CC0)."""
import json
import random

CITIES = """Paris|London|Berlin|Madrid|Rome|Vienna|Prague|Lisbon|Dublin|Oslo|Stockholm|Helsinki|Copenhagen|Warsaw|Athens|
Budapest|Brussels|Amsterdam|Zurich|Geneva|Munich|Hamburg|Milan|Naples|Venice|Florence|Barcelona|Seville|Porto|Lyon|Nice|
Edinburgh|Glasgow|Manchester|Oxford|Cambridge|Moscow|Istanbul|Cairo|Nairobi|Lagos|Accra|Cape Town|Casablanca|Tunis|Dubai|
Tehran|Baghdad|Delhi|Mumbai|Kolkata|Karachi|Dhaka|Bangkok|Hanoi|Singapore|Jakarta|Manila|Hong Kong|Shanghai|Beijing|Seoul|
Tokyo|Osaka|Kyoto|Sydney|Melbourne|Perth|Auckland|Wellington|New York|Boston|Chicago|Seattle|Denver|Austin|Dallas|Miami|
Atlanta|San Francisco|Los Angeles|San Diego|Portland|Toronto|Montreal|Vancouver|Mexico City|Havana|Lima|Bogota|Quito|
Santiago|Buenos Aires|Rio de Janeiro|Montevideo|Caracas|Reykjavik|Kyiv|Riga|Tallinn|Vilnius|Zagreb|Sofia|Bucharest""".replace("\n", "").split("|")
COUNTRY = {"Paris": "France", "London": "United Kingdom", "Berlin": "Germany", "Madrid": "Spain", "Rome": "Italy",
           "Vienna": "Austria", "Lisbon": "Portugal", "Dublin": "Ireland", "Oslo": "Norway", "Tokyo": "Japan",
           "Cairo": "Egypt", "Athens": "Greece", "Lima": "Peru", "Bogota": "Colombia", "Seoul": "South Korea",
           "Toronto": "Canada", "Sydney": "Australia", "Delhi": "India", "Nairobi": "Kenya", "Warsaw": "Poland"}
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "stormy", "partly cloudy", "overcast"]
PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo", "Maria", "Noah",
          "Olivia", "Peter", "Rosa", "Sam", "Tom", "Lucy", "Oscar", "Nina", "Paul", "Julia", "Max", "Ella", "Hugo", "Alice"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "today", "tomorrow"]
TOPICS = """the history of tea|the planet Mars|how bees make honey|the tallest mountain|the invention of the telephone|
whales|the French Revolution|how to bake bread|the rules of chess|Marie Curie|volcanoes|the Roman Empire|solar energy|
the best books of the year|electric cars|the Great Wall of China|how rainbows form|penguins|Leonardo da Vinci|
the Olympic Games|how to grow tomatoes|the moon landing|black holes|jazz music|the Amazon river|old castles in Scotland|
cheap flights to Rome|the news about space|dinosaurs|the deepest lake|how clocks work|Charles Darwin|coral reefs|
the population of Brazil|the capital of Mongolia|healthy breakfasts|how to tie a knot|lighthouses|the northern lights|
Isaac Newton|steam engines|the Silk Road|wild horses|the price of gold|new films this week|a recipe for apple pie|
train times to Berlin|foxes|owls|the Titanic|how to learn the piano|the human heart|Antarctica""".replace("\n", "").split("|")
WORDS = "river lantern brave orchard whisper harvest meadow curious anchor gentle thunder velvet compass shelter honest".split()
LANGS = ["French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Polish", "Japanese", "Greek", "Swedish"]


def pick(r, *options):
    return r.choice(options)


def cap(s):
    return s[:1].upper() + s[1:]


def tool(name, description, props, required=None):
    """An OpenAI function definition; props maps a name to (type, description[, enum])."""
    p = {}
    for key, spec in props.items():
        p[key] = {"type": spec[0]}
        if spec[1]:
            p[key]["description"] = spec[1]
        if len(spec) > 2:
            p[key]["enum"] = spec[2]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": p, "required": list(props) if required is None else required}}}


def shown(r, **fields):
    """A tool's result: JSON mostly, sometimes plain text."""
    if r.random() < 0.7:
        return json.dumps(fields)
    return ", ".join(f"{k}: {v}" for k, v in fields.items())


# Each maker returns (tool, ask) where ask() gives (user text, arguments, result, answer, thought).
def an(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def weather(r):
    name = pick(r, "get_weather", "get_weather", "get_current_weather", "weather", "weather_lookup", "current_weather", "fetch_weather",
                "check_weather", "getWeather", "forecast", "get_forecast")
    key = pick(r, "city", "city", "location", "location", "place", "town", "city_name", "query")
    props = {key: ("string", pick(r, "The name of the city", "City name", "The city, for example Paris", "", "Where to look",
                                  "City and country e.g. Bogota, Colombia", "The city and state, e.g. San Francisco, CA"))}
    unit = pick(r, None, None, None, "unit", "units")
    if unit:
        props[unit] = ("string", pick(r, "Temperature unit", "", "The unit to use"), ["celsius", "fahrenheit"])
    day = pick(r, None, None, None, "day", "date")
    if day:
        props[day] = ("string", pick(r, "The day of the forecast", "", "Day of the week"))
    t = tool(name, pick(r, "Get the current weather in a given city.", "Get the weather for a place.", "Look up the weather.",
                        "Returns the weather report of a city", "Get current temperature for a given location.",
                        "Fetch today's weather"), props, [key] + [day] * bool(day))

    def ask():
        c = r.choice(CITIES)
        place = f"{c}, {COUNTRY[c]}" if c in COUNTRY and r.random() < 0.3 else c
        args = {key: place}
        when, temp, sky = "", r.randint(-8, 36), r.choice(SKIES)
        u = r.choice(["celsius", "fahrenheit"]) if unit and r.random() < 0.6 else None
        if u == "fahrenheit":
            temp = temp * 9 // 5 + 32
        if day:
            d = r.choice(DAYS)
            when = f" {d}" if d in ("today", "tomorrow") else f" on {d}"
            args[day] = d
        q = pick(r, f"What is the weather in {place}{when}?", f"What's the weather like in {place}{when}?", f"How is the weather in {place}{when}?",
                 f"Will it rain in {place}{when}?", f"Do I need an umbrella in {place}{when}?", f"Tell me the weather in {place}{when}.",
                 f"How warm is it in {place}{when}?", f"Is it cold in {place}{when}?", f"weather in {place}{when}", f"Weather for {place}{when} please",
                 f"What is the temperature in {place}{when}?", f"I am going to {place}{when}. What will the weather be?",
                 f"Can you check the weather in {place}{when}?", f"Please look up the weather for {place}{when}.")
        if u:
            q = q[:-1] + f" in {u}{q[-1]}" if q[-1] in "?." else f"{q} in {u}"
            args[unit] = u
        deg = "degrees" if not u else f"degrees {cap(u)}"
        res = pick(r, shown(r, temperature=temp, condition=sky), shown(r, city=c, temperature=temp, sky=sky), f"{cap(sky)}, {temp} degrees",
                   shown(r, temp=temp, weather=sky, wind=r.randint(0, 40)))
        be = "will be" if day and args[day] != "today" else "is"
        a = pick(r, f"It {be} {sky} in {c}{when}, with a temperature of {temp} {deg}.", f"The weather in {c}{when} {be} {sky} and the temperature {be} {temp} {deg}.",
                 f"In {c} it {be} {sky}{when}, {temp} {deg}.")
        return q, args, res, a, pick(r, f"The user wants the weather in {place}. I will call {name}.", f"I need the weather in {place}, so I use {name}.")
    return t, ask


OPS = [("+", ["plus", "+"], lambda a, b: a + b), ("-", ["minus", "-"], lambda a, b: a - b), ("*", ["times", "multiplied by", "*", "x"], lambda a, b: a * b)]


def calculator(r):
    name = pick(r, "calculator", "calculate", "calc", "math", "evaluate", "compute", "do_math", "evaluate_expression")
    desc = pick(r, "Evaluate a mathematical expression.", "Do a calculation.", "A simple calculator", "Compute the value of an arithmetic expression.")
    two = r.random() < 0.25
    if two:
        name = pick(r, "add_numbers", "add", "sum_numbers") if r.random() < 0.5 else pick(r, "multiply", "multiply_numbers", "product")
        ka, kb = r.choice([("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")])
        kind = pick(r, "number", "integer")
        adding = name[:1] in "as"
        t = tool(name, "Add two numbers." if adding else "Multiply two numbers.", {ka: (kind, ""), kb: (kind, "")})
    else:
        key = pick(r, "expression", "expression", "expr", "formula", "input", "equation")
        t = tool(name, desc, {key: ("string", pick(r, "The expression to evaluate", "For example 2 + 2", "", "A sum such as 3 * 4"))})

    def ask():
        a, b = r.choice([(r.randint(2, 99), r.randint(2, 99)), (r.randint(10, 999), r.randint(2, 999)), (r.randint(100, 9999), r.randint(10, 9999))])
        op, words, f = OPS[0 if adding else 2] if two else r.choice(OPS)
        w = r.choice(words)
        if r.random() < 0.15 and not two:
            op, w, b = "/", "divided by", r.randint(2, 12)
            a = b * r.randint(2, 99)
            v = a // b
        else:
            v = f(a, b)
        q = pick(r, f"What is {a} {w} {b}?", f"Calculate {a} {w} {b}.", f"How much is {a} {w} {b}?", f"Please work out {a} {w} {b}.", f"{a} {w} {b} = ?",
                 f"Can you compute {a} {w} {b}?", f"Use the tool to find {a} {w} {b}.", f"What's {a} {w} {b}")
        args = {ka: a, kb: b} if two else {key: f"{a} {op} {b}"}
        res = pick(r, str(v), str(v), shown(r, result=v), shown(r, value=v))
        ans = pick(r, f"{a} {op} {b} = {v}", f"The result is {v}.", f"{a} {w} {b} is {v}.", f"The answer is {v}.")
        return q, args, res, ans, pick(r, f"The user wants to know {a} {op} {b}. I will call {name}.", f"This is a sum: {a} {op} {b}. I use {name}.")
    return t, ask


def search(r):
    name = pick(r, "search", "web_search", "search_web", "google", "internet_search", "find_information", "lookup", "search_wikipedia", "webSearch")
    key = pick(r, "query", "query", "q", "search_term", "keywords", "topic", "text")
    props = {key: ("string", pick(r, "The search query", "What to search for", "", "Words to look for"))}
    num = pick(r, None, None, "limit", "num_results", "max_results")
    if num:
        props[num] = ("integer", pick(r, "How many results to return", "", "Number of results"))
    t = tool(name, pick(r, "Search the web.", "Search the internet for information.", "Find pages about a topic.", "Look something up online"), props, [key])

    def ask():
        topic = r.choice(TOPICS)
        n = r.randint(2, 9)
        args = {key: topic}
        q = pick(r, f"Search for {topic}.", f"Search the web for {topic}.", f"Find information about {topic}.", f"Can you look up {topic}?", f"Look up {topic} online.",
                 f"Please search for {topic}.", f"What can you find about {topic}?", f"I want to read about {topic}. Can you search for it?", f"search {topic}")
        if num and r.random() < 0.6:
            args[num] = n
            q = q.rstrip(".?") + pick(r, f" and give me {n} results.", f". Show {n} results.", f", {n} results please.")
        title = cap(topic)
        res = json.dumps([{"title": pick(r, title, f"All about {topic}", f"{title}: an introduction", f"A guide to {topic}"), "url": f"https://example.com/{r.randint(10, 999)}"}])
        found = json.loads(res)[0]
        a = pick(r, f"I found a page called \"{found['title']}\": {found['url']}", f"Here is what I found: \"{found['title']}\" at {found['url']}")
        return q, args, res, a, pick(r, f"The user wants to know about {topic}. I will call {name}.", f"I should search for {topic} with {name}.")
    return t, ask


UNITS = [("kilometers", "miles", 0.621371), ("miles", "kilometers", 1.609344), ("meters", "feet", 3.28084), ("feet", "meters", 0.3048),
         ("kilograms", "pounds", 2.204623), ("pounds", "kilograms", 0.453592), ("inches", "centimeters", 2.54), ("centimeters", "inches", 0.393701),
         ("liters", "gallons", 0.264172), ("gallons", "liters", 3.785412), ("grams", "ounces", 0.035274), ("ounces", "grams", 28.349523),
         ("hours", "minutes", 60), ("days", "hours", 24)]


def convert(r):
    money = r.random() < 0.3
    if money:
        name = pick(r, "convert_currency", "exchange", "currency_converter", "exchange_rate")
        desc = pick(r, "Convert money from one currency to another.", "Currency conversion")
    else:
        name = pick(r, "convert_units", "unit_converter", "convert", "unit_conversion", "convert_measurement")
        desc = pick(r, "Convert a value from one unit to another.", "Unit conversion", "Convert between units of measurement.")
    kv = pick(r, "value", "amount", "number", "quantity")
    ka, kb = r.choice([("from_unit", "to_unit"), ("from", "to"), ("source", "target"), ("unit_from", "unit_to")])
    t = tool(name, desc, {kv: ("number", pick(r, "The value to convert", "")), ka: ("string", pick(r, "The unit to convert from", "")), kb: ("string", pick(r, "The unit to convert to", ""))})

    def ask():
        x = r.choice([r.randint(1, 20), r.randint(10, 500), r.randint(1, 99) + 0.5])
        if money:
            a, b = r.sample(["euros", "dollars", "pounds", "yen", "francs", "rupees"], 2)
            f = round(r.uniform(0.5, 3), 2)
        else:
            a, b, f = r.choice(UNITS)
        y = round(x * f, 2)
        q = pick(r, f"How many {b} are {x} {a}?", f"Convert {x} {a} to {b}.", f"What is {x} {a} in {b}?", f"Please change {x} {a} into {b}.",
                 f"I have {x} {a}. How much is that in {b}?", f"{x} {a} to {b}", f"How much is {x} {a} in {b}?")
        res = pick(r, str(y), shown(r, result=y), shown(r, value=y, unit=b))
        return q, {kv: x, ka: a, kb: b}, res, pick(r, f"{x} {a} is {y} {b}.", f"{x} {a} are {y} {b}.", f"That is {y} {b}."), \
            f"The user wants {x} {a} in {b}. I will call {name}."
    return t, ask


def clock(r):
    name = pick(r, "get_time", "get_current_time", "current_time", "time", "world_clock", "what_time", "time_in_city")
    key = pick(r, "city", "location", "timezone", "place")
    t = tool(name, pick(r, "Get the current time in a city.", "Tells the time anywhere in the world.", "Get the local time"), {key: ("string", pick(r, "The city", "", "Name of the place"))})

    def ask():
        c = r.choice(CITIES)
        at = f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
        q = pick(r, f"What time is it in {c}?", f"Tell me the time in {c}.", f"What's the time in {c} now?", f"time in {c}", f"Do you know what time it is in {c}?",
                 f"Is it late in {c}?", f"Please check the clock in {c}.")
        return q, {key: c}, pick(r, at, shown(r, time=at), shown(r, city=c, time=at)), pick(r, f"It is {at} in {c}.", f"The time in {c} is {at}."), \
            pick(r, f"The user asks for the time in {c}. I will call {name}.", f"I use {name} for the time in {c}.")
    return t, ask


def timer(r):
    name = pick(r, "set_timer", "start_timer", "set_alarm", "create_timer", "timer")
    key = pick(r, "minutes", "duration", "duration_minutes", "length")
    t = tool(name, pick(r, "Set a timer for a number of minutes.", "Start a countdown.", "Start a timer"), {key: ("integer", pick(r, "How many minutes", "Minutes", ""))})

    def ask():
        n = r.choice([1, 2, 3, 5, 8, 10, 12, 15, 20, 25, 30, 45, 60, 90])
        m = "minute" if n == 1 else "minutes"
        q = pick(r, f"Set a timer for {n} {m}.", f"Start a timer for {n} {m} please.", f"Wake me in {n} {m}.", f"Remind me in {n} {m}.", f"timer {n} {m}", f"Can you set a {n} minute timer?")
        return q, {key: n}, pick(r, "ok", shown(r, status="started"), shown(r, status="ok", minutes=n)), pick(r, f"Your timer is set for {n} {m}.", f"I have started a timer for {n} {m}."), \
            f"The user wants a timer of {n} {m}. I will call {name}."
    return t, ask


def message(r):
    name = pick(r, "send_message", "send_email", "send_text", "email", "message", "write_to")
    ka, kb = r.choice([("to", "body"), ("recipient", "text"), ("name", "message"), ("to", "content")])
    t = tool(name, pick(r, "Send a message to a person.", "Send a short message.", "Write to somebody"), {ka: ("string", pick(r, "Who gets it", "", "The recipient")), kb: ("string", pick(r, "The text", ""))})
    says = ["I will be late", "dinner is ready", "the train has left", "happy birthday", "see you at noon", "the meeting is cancelled", "please call me", "I am on my way",
            "thank you for the flowers", "the door is open", "we won the game", "I found your keys", "bring some milk", "the party starts at eight", "good luck tomorrow"]

    def ask():
        p, s = r.choice(PEOPLE), r.choice(says)
        q = pick(r, f"Send {p} a message: {s}.", f"Tell {p} that {s}.", f"Write to {p}: {s}", f"Please message {p} and say \"{s}\".", f"Let {p} know that {s}.")
        return q, {ka: p, kb: cap(s) + "." if r.random() < 0.3 else s}, pick(r, "sent", shown(r, status="sent"), shown(r, ok=True)), \
            pick(r, f"I have sent your message to {p}.", f"Done. {p} will get your message."), f"The user wants to write to {p}. I will call {name}."
    return t, ask


def define(r):
    name = pick(r, "define_word", "dictionary", "get_definition", "translate", "translate_word")
    if name.startswith("trans"):
        ka, kb = r.choice([("text", "language"), ("word", "to"), ("text", "target_language")])
        t = tool(name, pick(r, "Translate a text into another language.", "Translate words"), {ka: ("string", ""), kb: ("string", pick(r, "The language to translate into", ""))})
    else:
        ka, kb = pick(r, "word", "term"), None
        t = tool(name, pick(r, "Look up a word in the dictionary.", "Get the meaning of a word."), {ka: ("string", pick(r, "The word", ""))})

    def ask():
        w, lang = r.choice(WORDS), r.choice(LANGS)
        if kb:
            out = "".join(r.choice(["la", "ro", "mi", "ter", "en", "sa", "vo", "lu"]) for _ in range(3))
            q = pick(r, f"Translate \"{w}\" into {lang}.", f"How do you say \"{w}\" in {lang}?", f"What is {w} in {lang}?")
            return q, {ka: w, kb: lang}, pick(r, out, shown(r, translation=out)), f"In {lang}, \"{w}\" is \"{out}\".", f"The user wants {w} in {lang}. I will call {name}."
        q = pick(r, f"Look up the word {w}.", f"Use the dictionary to find the meaning of {w}.", f"Find \"{w}\" in the dictionary.")
        d = r.choice(["a kind of place", "a quality of people", "a thing one can see", "something used at sea", "a state of the weather"])
        return q, {ka: w}, pick(r, d, shown(r, definition=d)), f"The dictionary says: {d}.", f"The user asks about the word {w}. I will call {name}."
    return t, ask


VERBS = "create delete update open close book order find start stop schedule cancel check rate track move clean paint lock unlock save print play share repair".split()
NOUNS = "ticket order meeting alarm file note task package invoice room table taxi flight playlist song photo door light lamp garden robot window letter report event boat bike car shelf list recipe fan heater camera".split()
EXTRA = [(["name", "title", "label"], "string", lambda r: r.choice(["Sunrise", "Blue Bird", "Project Seven", "Morning Walk", "Red Kite", "Old Mill", "Silver Lake", "Apple Tree", "North Star"] + PEOPLE), lambda v: f"called {v}"),
         (["day", "date", "when"], "string", lambda r: r.choice(DAYS[:7]), lambda v: f"on {v}"),
         (["count", "quantity", "number", "people"], "integer", lambda r: r.randint(2, 30), lambda v: f"for {v}"),
         (["room", "place", "location", "where"], "string", lambda r: r.choice(["kitchen", "office", "garden", "hall", "library", "bedroom", "garage", "attic", "cellar"]), lambda v: f"in the {v}"),
         (["color", "colour"], "string", lambda r: r.choice(["blue", "green", "red", "yellow", "white", "black", "orange"]), lambda v: f"in {v}"),
         (["id", "number", "code"], "integer", lambda r: r.randint(10, 9999), lambda v: f"with number {v}"),
         (["time", "at", "start_time"], "string", lambda r: f"{r.randint(6, 22)}:{r.choice(['00', '15', '30', '45'])}", lambda v: f"at {v}"),
         (["person", "user", "owner", "customer"], "string", lambda r: r.choice(PEOPLE), lambda v: f"for {v}"),
         (["city", "destination", "to"], "string", lambda r: r.choice(CITIES), lambda v: f"to {v}"),
         (["minutes", "duration"], "integer", lambda r: r.choice([5, 10, 15, 20, 30, 45, 60]), lambda v: f"for {v} minutes"),
         (["urgent", "important"], "boolean", lambda r: True, lambda v: "urgently"),
         (["percent", "level", "brightness"], "number", lambda r: r.randint(1, 100), lambda v: f"at {v} percent")]


def generic(r):
    v, n = r.choice(VERBS), r.choice(NOUNS)
    name = pick(r, f"{v}_{n}", f"{v}_{n}", f"{n}_{v}", f"{v}{cap(n)}", f"{v}_the_{n}", f"{v}_{n}_{r.randint(1, 9)}")
    used, fields = set(), []
    for keys, kind, value, phrase in r.sample(EXTRA, r.randint(1, 3)):
        k = r.choice([x for x in keys if x not in used])
        used.add(k)
        fields.append((k, kind, value, phrase))
    t = tool(name, pick(r, f"{cap(v)} {an(n)}.", f"{cap(v)}s the {n}", f"Use this to {v} {an(n)}."), {k: (kind, pick(r, "", f"The {k} of the {n}")) for k, kind, _, _ in fields})

    def ask():
        args = {k: value(r) for k, _, value, _ in fields}
        how = " ".join(phrase(args[k]) for k, _, _, phrase in fields)
        q = pick(r, f"{cap(v)} the {n} {how}.", f"Please {v} {an(n)} {how}.", f"Can you {v} the {n} {how}?", f"I want to {v} {an(n)} {how}.", f"{v} {n} {how}")
        return q, args, pick(r, "ok", shown(r, status="ok"), "done", shown(r, success=True)), pick(r, f"Done. I used {name} for the {n}.", f"That is done: {v} {n} {how}."), \
            f"The user wants to {v} {an(n)}. I will call {name}."
    return t, ask


MAKERS = [weather] * 4 + [calculator] * 3 + [search] * 3 + [convert] * 2 + [clock] * 2 + [timer, message, define] + [generic] * 6
SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant with tools.", "Answer briefly.", "Use the tools when they help.", "You are a friendly helper."]


def call(name, args):
    return {"type": "function", "function": {"name": name, "arguments": args}}


def dialogue(r, plain):
    """One dialogue. `plain` gives (question, answer, thought) for turns that need no tool."""
    made, names = [], set()
    for _ in range(r.choice([1, 1, 1, 2, 2, 3, 4])):
        t, ask = r.choice(MAKERS)(r)
        if t["function"]["name"] not in names:
            names.add(t["function"]["name"])
            made.append((t, ask))
    tools = [t for t, _ in made]
    messages = [{"role": "system", "content": r.choice(SYSTEMS)}] if r.random() < 0.25 else []
    think = r.random() < 0.5

    def say(content, thought, calls=None):
        m = {"role": "assistant", "content": content, "reasoning_content": thought if think else ""}
        if calls:
            m["tool_calls"] = calls
        messages.append(m)

    for turn in range(r.choice([1, 1, 1, 1, 2, 2, 3])):
        if r.random() < 0.2:
            q, a, thought = plain(r)
            messages.append({"role": "user", "content": q})
            say(a, thought)
            continue
        t, ask = r.choice(made)
        name = t["function"]["name"]
        q, args, res, a, thought = ask()
        if r.random() < 0.08:                                # two calls in one turn
            q2, args2, res2, a2, _ = ask()
            messages.append({"role": "user", "content": q + " " + pick(r, "", "And also: ", "Then: ") + q2})
            say("", thought, [call(name, args), call(name, args2)])
            messages += [{"role": "tool", "content": res}, {"role": "tool", "content": res2}]
            say(a + " " + a2, "I have both results and can answer.")
            continue
        messages.append({"role": "user", "content": q})
        say("", thought, [call(name, args)])
        if turn == 0 and r.random() < 0.25:                  # ends with the call itself
            break
        messages.append({"role": "tool", "content": res})
        say(a, pick(r, "The tool has answered. I can tell the user.", f"{name} gave a result. I will report it."))
    return {"messages": messages, "tools": tools}


if __name__ == "__main__":
    rng = random.Random(1)
    for _ in range(5):
        print(json.dumps(dialogue(rng, lambda r: ("Hello.", "Hello! How can I help?", "The user greets me.")), indent=1))
