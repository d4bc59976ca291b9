"""The words that prompts.py fills its templates with: topics, people, places, tasks. All of it made up or common knowledge."""

SCIENCE = (
    "photosynthesis", "plate tectonics", "the water cycle", "black holes", "vaccines", "the greenhouse effect",
    "DNA replication", "electric motors", "the periodic table", "natural selection", "gravity", "semiconductors",
    "sound waves", "antibiotics", "the human heart", "acids and bases", "nuclear fusion", "comets", "the ozone layer",
    "lenses and mirrors", "enzymes", "radioactive decay", "ocean currents", "the immune system", "superconductors",
    "cell membranes", "the Doppler effect", "batteries", "earthquakes", "the carbon cycle", "neurons", "entropy",
    "rockets", "magnets", "the moon's phases",
)  # fmt: skip
SOCIETY = (
    "inflation", "the industrial revolution", "the printing press", "democracy", "the silk road", "supply and demand",
    "public libraries", "urban planning", "the Renaissance", "trade unions", "human rights", "globalisation",
    "stoicism", "free speech", "taxation", "the Roman republic", "utilitarianism", "museums", "folk music",
    "the history of tea", "advertising", "migration", "minimum wages", "the Enlightenment", "patents", "elections",
    "the space race", "colonialism", "propaganda", "social media", "the welfare state", "ancient Egypt",
    "existentialism", "the origins of writing", "tourism",
)  # fmt: skip
PRACTICAL = (
    "saving money as a student", "growing tomatoes on a balcony", "learning a new language", "sleeping better",
    "preparing for a job interview", "baking bread at home", "running a first marathon", "organising a small kitchen",
    "choosing a bicycle", "reading more books", "training a puppy", "public speaking", "working from home",
    "packing for a trip", "eating less sugar", "writing a good cover letter", "keeping houseplants alive",
    "fixing a leaking tap", "budgeting", "reducing stress", "learning the guitar", "hosting a dinner",
    "saving electricity", "studying for an exam", "hiking safely", "making new friends in a new city",
    "meditation for beginners", "cleaning a coffee machine", "negotiating a salary",
)  # fmt: skip
PLACES = (
    "Lisbon", "the Scottish Highlands", "Kyoto", "a small fishing village", "New York", "the Sahara", "Iceland",
    "Buenos Aires", "a mountain hut in the Alps", "Cape Town", "Venice", "a lighthouse on a cliff", "the Amazon",
    "Istanbul", "Montreal", "Bali", "an old railway station", "Prague", "the Rocky Mountains", "Marrakesh",
    "a night market", "Vienna", "Nairobi", "Seoul",
)  # fmt: skip
NAMES = (
    "Maria", "James", "Aisha", "Tom", "Elena", "David", "Mei", "Carlos", "Anna", "Omar", "Julia", "Peter", "Priya",
    "Lucas", "Sofia", "Ben", "Nadia", "Henry", "Clara", "Ivan", "Grace", "Samuel", "Lena", "Victor", "Ruth", "Daniel",
    "Emma", "Noah",
)  # fmt: skip
SURNAMES = (
    "Harlow", "Mendes", "Okafor", "Lindqvist", "Brennan", "Castillo", "Novak", "Whitfield", "Tanaka", "Moreau",
    "Fischer", "Abara", "Kowalski", "Reyes", "Sutton", "Haddad", "Larsen", "Pereira", "Walsh", "Dunmore", "Iyer",
    "Bianchi", "Grant",
)  # fmt: skip
TOWNS = (
    "Ashford Falls", "Millbrook", "Port Denning", "Green Hollow", "Easterly", "Cold Spring", "Harrow Bay", "Redstone",
    "Lakeview", "Whitmore", "Stonebridge", "Fairhaven", "Oakdale", "Silverton", "Marlow Heights", "Kingsport",
    "Bellweather",
)  # fmt: skip
ROLES = (
    "a ship's captain in the eighteenth century", "a patient maths teacher", "a grumpy detective",
    "a medieval blacksmith", "a friendly robot", "a travel guide", "a wise grandmother", "a football coach",
    "an astronaut on Mars", "a strict librarian", "a famous chef", "a shy ghost", "a stand-up comedian", "a doctor",
    "a lawyer", "a wizard", "a museum guide", "a journalist", "a tree that is three hundred years old",
    "a software engineer", "a farmer", "a pirate", "a news presenter", "a poet",
)  # fmt: skip
ROLE_QUESTIONS = (
    "What is the hardest part of your work?", "What did you have for breakfast?",
    "What do you think of modern technology?", "Tell me about the day that changed your life.",
    "What advice would you give to a young person?", "What are you afraid of?", "How do you spend your evenings?",
    "Why should anyone listen to you?", "What is the most beautiful thing you have seen?", "Explain what money is.",
    "What would you do with a free year?", "Describe the place where you live.",
)  # fmt: skip
TASKS = (
    "checks whether a string is a palindrome", "returns the n-th Fibonacci number", "sorts a list with merge sort",
    "counts the words in a text file", "finds the largest element of a list", "reverses a linked list",
    "removes duplicates from a list and keeps the order", "computes the factorial of a number",
    "validates an email address", "merges two sorted lists", "finds all prime numbers up to n",
    "converts Celsius to Fahrenheit", "implements a stack", "computes the average of a list of numbers",
    "reads a CSV file and prints the sum of a column", "implements binary search",
    "checks whether two words are anagrams", "transposes a matrix", "counts the vowels of a string",
    "implements a queue", "computes the greatest common divisor of two numbers", "flattens a nested list",
    "capitalises every word of a sentence", "finds the longest word of a sentence", "simulates the roll of two dice",
    "builds a simple calculator", "parses a date", "finds the shortest path in a graph", "checks balanced brackets",
    "groups a list of people by age", "implements a cache",
)  # fmt: skip
LANGUAGES = (
    "Python", "Python", "Python", "JavaScript", "C++", "Java", "C", "Go", "SQL",
)  # fmt: skip
TONGUES = (
    "French", "Spanish", "German", "Italian", "Portuguese",
)  # fmt: skip
GENRES = (
    "short story", "poem", "letter", "diary entry", "blog post", "speech", "dialogue", "product description", "review",
    "email",
)  # fmt: skip
SUBJECTS = (
    "a lost suitcase", "an unexpected guest", "the last day of summer", "a broken clock",
    "a neighbour who plays the trumpet", "a new bakery", "rain on a wedding day", "an old photograph",
    "a dog that saved its owner", "a missed train", "a quiet library", "a garden in winter", "the first day at school",
    "a letter that arrives forty years late", "a power cut", "an election", "a recycled rubber shoe",
    "a delayed order", "a town festival", "moving to another city", "a school project", "a birthday",
)  # fmt: skip
THINGS = (
    "apples", "notebooks", "tickets", "cookies", "marbles", "books", "pencils", "eggs", "bottles of juice", "chairs",
    "stickers", "flowers", "sandwiches", "stamps", "candles", "shirts", "bags of rice", "toy cars", "posters",
    "oranges", "lamps", "boxes",
)  # fmt: skip
EVENTS = (
    "a fire in a warehouse", "the opening of a new bridge", "a flood in the old town", "a strike of bus drivers",
    "the discovery of a Roman coin hoard", "the closing of a school", "a rescue at sea", "a record harvest",
    "a theft from the city museum", "a water shortage", "the arrival of a new hospital wing", "a football final",
    "a storm that cut the power", "the return of wolves to the forest", "a court case about a farm",
    "a crash on the motorway", "a plan for a wind farm", "a food market that was saved by its customers",
    "a chemical leak", "a missing hiker found alive",
)  # fmt: skip
REASONS = (
    "years of delays", "a report that blamed poor maintenance", "an unusually dry spring", "pressure from residents",
    "a dispute over money", "a change in the law", "a sudden change of weather", "an error in the plans",
    "a rise in prices", "complaints that nobody had answered", "an investigation that took eighteen months",
    "a gift from an unnamed donor",
)  # fmt: skip
RESULTS = (
    "dozens of families had to leave their homes", "traffic was stopped for most of the day",
    "shops reported their best week", "the council promised an independent review",
    "three people were taken to hospital", "nobody was hurt", "more than a thousand people signed a petition",
    "the price of a ticket will rise", "volunteers worked through the night", "two officials resigned",
    "the work is expected to take until the autumn", "schools stayed closed until Thursday",
    "the insurance will pay only part of the damage", "the park will stay open to the public",
    "engineers are still on the site",
)  # fmt: skip
QUOTES = (
    "We were lucky, it could have been much worse", "I have never seen anything like it in thirty years",
    "People want answers", "This is a good day for the town", "We told them about it last year and nothing was done",
    "It started with a loud bang", "The children slept through all of it", "Nobody asked us",
    "We will rebuild, whatever it takes", "It is only the first step",
    "You could see it from the other side of the valley", "We are grateful to everyone who helped",
    "The numbers do not add up",
)  # fmt: skip
JOBS = (
    "mayor", "fire chief", "shop owner", "police spokeswoman", "teacher", "engineer", "farmer", "nurse", "student",
    "bus driver", "historian", "retired postman", "hospital director", "marine biologist", "local councillor",
    "witness", "union leader",
)  # fmt: skip
SENTIMENTS = (
    "The phone arrived quickly, but the battery lasts only half a day.", "A wonderful film with a weak ending.",
    "The staff was rude and the soup was cold.", "Best headphones I have owned, worth every cent.",
    "It does what it says.", "I waited three weeks for a parcel that was empty.",
    "The hotel was clean, the view was better than in the pictures.", "A dull book that I could not finish.",
    "My children love this game, and so do I.", "Average, nothing more.", "The update made everything slower.",
    "Great service, and they even remembered my name.",
)  # fmt: skip
