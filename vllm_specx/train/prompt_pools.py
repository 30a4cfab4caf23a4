"""Words that fill the prompt templates; `{name}` in a template is a draw from POOLS["name"]."""

from __future__ import annotations


def _words(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(separator) if word.strip())


POOLS: dict[str, tuple[str, ...]] = {
    "name": _words(
        "Abena, Adrian, Alba, Alina, Amir, Anders, Anika, Anton, Arjun, Astrid, Beatrix, Benno, Bilal, Birgit, "
        "Camila, Casper, Celia, Chidi, Clara, Cyrus, Dalia, Dario, Delphine, Diego, Edda, Edwin, Elif, Emil, Esme, "
        "Ezra, Fatima, Felix, Fiona, Gideon, Giulia, Hana, Harald, Hugo, Ibrahim, Ida, Imani, Isak, Jamal, Jasmin, "
        "Joachim, Josefa, Kaito, Kamala, Katya, Kofi, Lars, Latoya, Leon, Lina, Lorenzo, Lucia, Magnus, Malik, Mara, "
        "Mateo, Mei, Mina, Mohan, Nadine, Niall, Nils, Noor, Olga, Omar, Otto, Paloma, Pavel, Petra, Rafael, Ravi, "
        "Rhea, Ruben, Sadie, Samira, Santiago, Selma, Silas, Sofia, Tariq, Tessa, Theo, Umar, Una, Victor, Wanda, "
        "Willem, Xavier, Yara, Yosef, Zainab, Zeno, Tom, Anna, Mary, John, Sarah, David, Emily, James, Kate, Mike"
    ),
    "surname": _words(
        "Adler, Andersson, Baptiste, Barros, Becker, Bianchi, Carter, Chen, Cohen, Cruz, Diaz, Dubois, Eze, Ferrari, "
        "Fontaine, Gupta, Haddad, Hansen, Hughes, Iyer, Jansen, Johnson, Kaya, Kim, Kruger, Lambert, Lopez, Mbeki, "
        "Mendes, Miller, Mishra, Mori, Nguyen, Nielsen, Novotny, Obi, Papadakis, Park, Patel, Popescu, Reyes, Russo, "
        "Santos, Sato, Schmidt, Singh, Smith, Suzuki, Taylor, Torres, Urban, Vogel, Walsh, Wang, Wright, Young"
    ),
    "city": _words(
        "Amsterdam, Athens, Auckland, Baku, Barcelona, Belgrade, Berlin, Bilbao, Boston, Bristol, Brussels, Budapest, "
        "Cairo, Calgary, Cape Town, Chicago, Chennai, Copenhagen, Dakar, Dallas, Delhi, Edinburgh, Florence, Geneva, "
        "Glasgow, Hanoi, Helsinki, Hong Kong, Istanbul, Jakarta, Kampala, Kyoto, Lagos, Leipzig, London, Madrid, Manila, "
        "Marseille, Melbourne, Milan, Montreal, Mumbai, Munich, Naples, New York, Nice, Paris, Prague, Rome, Rotterdam, "
        "San Diego, Santiago, Seattle, Seoul, Shanghai, Singapore, Stockholm, Sydney, Tokyo, Toronto, Tunis, Warsaw, Zurich"
    ),
    "country": _words(
        "Argentina, Australia, Austria, Bangladesh, Belgium, Bolivia, Brazil, Canada, Chile, China, Colombia, Croatia, "
        "Cuba, Denmark, Ecuador, Egypt, Estonia, Ethiopia, Finland, France, Germany, Ghana, Greece, Hungary, Iceland, "
        "India, Indonesia, Iran, Ireland, Italy, Jamaica, Japan, Jordan, Kenya, Latvia, Malaysia, Mexico, Mongolia, "
        "Morocco, Nepal, New Zealand, Nigeria, Norway, Pakistan, Peru, Poland, Portugal, Romania, Scotland, Senegal, "
        "South Africa, South Korea, Spain, Sweden, Switzerland, Tanzania, Thailand, Turkey, Ukraine, Uruguay, Vietnam"
    ),
    "job": _words(
        "accountant, actor, architect, baker, barber, beekeeper, biologist, bus driver, carpenter, chef, chemist, "
        "choir singer, civil engineer, coach, composer, dentist, detective, diver, electrician, farmer, firefighter, "
        "fisherman, florist, gardener, geologist, glass blower, hairdresser, historian, illustrator, journalist, judge, "
        "lawyer, librarian, lighthouse keeper, mail carrier, mechanic, midwife, miner, musician, nurse, optician, "
        "painter, park ranger, pharmacist, photographer, pilot, plumber, poet, potter, programmer, receptionist, sailor, "
        "scientist, shepherd, shoemaker, surgeon, tailor, teacher, translator, vet, waiter, watchmaker, welder, zookeeper"
    ),
    "topic": _words(
        "photosynthesis, plate tectonics, inflation, black holes, machine learning, vaccines, the water cycle, recursion, "
        "supply and demand, the French Revolution, natural selection, blockchain, the immune system, gravity, jazz, "
        "climate change, antibiotics, neural networks, the Roman Empire, compound interest, DNA, electricity, tides, "
        "magnetism, volcanoes, the printing press, sleep, memory, nutrition, renewable energy, the Silk Road, "
        "impressionism, coral reefs, earthquakes, cryptography, databases, operating systems, the human heart, bees, "
        "the stock market, relativity, quantum mechanics, the carbon cycle, language learning, meditation, fermentation, "
        "rainbows, the moon landing, the Industrial Revolution, probability, calculus, prime numbers, the Renaissance, "
        "wind turbines, nuclear power, batteries, GPS, the internet, email, encryption, version control, unit testing, "
        "cloud computing, containers, HTTP, binary search, hash tables, sorting, linked lists, graphs, garbage collection, "
        "object oriented programming, functional programming, type systems, concurrency, APIs, caching, load balancing, "
        "regular expressions, compilers, spreadsheets, budgeting, mortgages, insurance, taxes, retirement savings, "
        "negotiation, public speaking, time management, leadership, teamwork, remote work, job interviews, networking, "
        "yoga, running, swimming, stretching, hydration, vitamins, protein, allergies, migraines, stress, anxiety, "
        "glaciers, deserts, rainforests, monsoons, tornadoes, lightning, clouds, ocean currents, whales, dolphins, "
        "migration of birds, ants, spiders, dinosaurs, fossils, mushrooms, bacteria, viruses, stem cells, hormones, "
        "democracy, human rights, the United Nations, federalism, voting systems, ancient Egypt, the Vikings, the Aztecs, "
        "samurai, feudalism, the Black Death, the Cold War, World War I, colonialism, Buddhism, stoicism, utilitarianism, "
        "existentialism, Shakespeare, haiku, opera, ballet, film editing, photography, architecture, pottery, perspective in painting"
    ),
    "skill": _words(
        "playing the guitar, cooking rice, baking bread, learning Spanish, learning Japanese, touch typing, chess, "
        "public speaking, drawing portraits, growing tomatoes, saving money, running a marathon, writing a novel, "
        "fixing a bicycle, knitting, swimming, meditation, photography, making coffee, painting with watercolors, "
        "programming in Python, learning SQL, training a dog, planning a trip, negotiating a salary, making friends in a new city, "
        "reading faster, remembering names, getting up early, studying for exams, writing a resume, cleaning a kitchen, "
        "brewing tea, composting, sewing, sailing, skiing, juggling, singing, writing poems, giving feedback, "
        "managing a small team, preparing a presentation, hosting a dinner, organizing a bookshelf, packing a suitcase"
    ),
    "thing": _words(
        "lantern, violin, compass, teapot, bicycle, umbrella, mirror, key, clock, map, letter, coin, telescope, piano, "
        "train ticket, wooden box, scarf, camera, boat, kite, lamp, ring, notebook, radio, statue, bell, feather, ladder, "
        "bridge, garden gate, blue door, painting, robot, typewriter, balloon, chess set, music box, seed, shell, puppet"
    ),
    "animal": _words(
        "dog, cat, fox, owl, rabbit, horse, elephant, penguin, tortoise, crow, dolphin, hedgehog, bear, wolf, squirrel, "
        "goat, parrot, mouse, lion, otter, deer, frog, whale, donkey, octopus, sparrow, bee, camel, lizard, swan"
    ),
    "place": _words(
        "an old lighthouse, a mountain village, a space station, a crowded market, a quiet library, a small island, "
        "a train at night, a snowed-in cabin, a desert town, a flooded city, an abandoned factory, a busy kitchen, "
        "a forest at dawn, a harbor, a castle, a hospital, a school, a farm, a museum after closing time, a theater, "
        "a rooftop garden, a submarine, a bakery, a monastery, a football stadium, an airport, a cave, a river boat"
    ),
    "emotion": _words(
        "hope, fear, joy, loneliness, envy, gratitude, anger, curiosity, regret, pride, love, grief, wonder, boredom, courage, trust"
    ),
    "genre": _words(
        "science fiction, fantasy, mystery, horror, comedy, romance, adventure, historical fiction, a fairy tale, a fable, a thriller, drama"
    ),
    "tone": _words(
        "formal, friendly, humorous, polite, urgent, enthusiastic, neutral, apologetic, persuasive, professional, casual, poetic, serious, simple"
    ),
    "audience": _words(
        "a five-year-old, a ten-year-old, a high school student, a college student, a beginner, my grandmother, an expert, "
        "a busy manager, a new employee, a tourist, someone with no technical background, a software engineer, a nurse, a farmer"
    ),
    "product": _words(
        "wireless headphones, a standing desk, a water bottle, a fitness tracker, running shoes, an electric bike, a coffee maker, "
        "a backpack, a smart lamp, a robot vacuum, a garden hose, a tent, sunglasses, a keyboard, a phone case, a blender, "
        "a cookbook, a board game, a mattress, a winter jacket, a language app, a budgeting app, an online course, a toaster, a camera drone"
    ),
    "company": _words(
        "Northwind, Bluebird Labs, Greenleaf, Acme Tools, Sunrise Bakery, Orbit Systems, Harbor Logistics, Pinecone Media, "
        "Silverline Bank, Redwood Clinics, Maple Books, Copper Kettle, Lumen Energy, Riverside Motors, Quantum Foods, Atlas Travel"
    ),
    "food": _words(
        "pancakes, tomato soup, fried rice, lentil curry, pizza dough, apple pie, chicken stew, roasted vegetables, pasta salad, "
        "banana bread, mushroom risotto, fish tacos, an omelette, hummus, chocolate cake, oatmeal cookies, potato salad, ramen, "
        "stuffed peppers, a smoothie, guacamole, vegetable lasagna, beef chili, spring rolls, pumpkin soup, French toast"
    ),
    "item": _words(
        "apples, oranges, pencils, books, marbles, stickers, cookies, eggs, stamps, tickets, bottles, candles, roses, cupcakes, "
        "notebooks, balloons, postcards, peaches, coins, cards, toys, chairs, boxes, bags of rice, tomatoes, muffins, shirts, bricks, "
        "seashells, bracelets, pumpkins, crayons, plants, sandwiches, pies, kites, beads, lemons, pens, cups"
    ),
    "vehicle": _words("car, bus, train, truck, bicycle, boat, plane, tram, scooter, van"),
    "unit": _words(
        "meters, kilometers, miles, liters, kilograms, hours, minutes, pages, steps, gallons"
    ),
    "weekday": _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "month": _words(
        "January, February, March, April, May, June, July, August, September, October, November, December"
    ),
    "language": _words(
        "Python, Python, Python, Python, JavaScript, TypeScript, Java, C++, C, Go, Rust, Ruby, PHP, C#, Bash, Kotlin, Swift"
    ),
    "human_language": _words(
        "French, Spanish, German, Italian, Portuguese, Dutch, Swedish, Latin, Polish"
    ),
    "adjective": _words(
        "quiet, brave, rusty, golden, lonely, clever, enormous, tiny, ancient, broken, curious, gentle, stubborn, mysterious, cheerful, forgotten"
    ),
    "fn_verb": _words(
        "count, find, sum, remove, filter, merge, split, sort, group, check, convert, replace, rotate, reverse, compute, "
        "select, extract, join, insert, swap, flatten, format, validate, parse, compare, encode, decode, build, update, collect"
    ),
    "fn_noun": _words(
        "numbers, words, items, values, pairs, vowels, digits, lines, strings, duplicates, scores, prices, dates, names, keys, "
        "characters, elements, records, orders, intervals, points, rows, columns, nodes, tokens, letters, totals, indices, users, files"
    ),
    "arg": _words(
        "xs, nums, values, items, data, words, text, s, lst, arr, seq, line, records, scores, prices, names"
    ),
    "condition": _words(
        "that are even, that are odd, that are greater than {n2}, that are smaller than {n2}, that are divisible by {n1}, "
        "that are negative, that are positive, that appear more than once, that appear exactly once, that start with a vowel, "
        "that end with the letter '{letter}', that are longer than {n1} characters, that contain a digit, that are palindromes, "
        "at even positions, at odd positions, between {n1} and {n2}, that are prime, that are perfect squares, that are uppercase",
    ),
    "aggregate": _words(
        "the sum of all elements, the largest of the elements, the smallest of the elements, the number of elements, the average of the elements, "
        "a sorted list of the elements, a list of the squares of the elements, the product of the elements, the first of the elements, the last of the elements, "
        "a set of the elements, the median of the elements, a dictionary that counts the elements, a comma separated string of the elements, "
        "a list without the elements, the positions of the elements, a list with the elements doubled, the longest of the elements"
    ),
    "letter": _words("a, b, d, e, k, m, n, r, s, t, y, z"),
    "programming_task": _words(
        "reads a CSV file and prints the average of one column | checks whether a string is a palindrome | computes the factorial of a number | "
        "finds the longest word in a sentence | removes duplicates from a list while keeping the order | counts the words in a text file | "
        "converts Celsius to Fahrenheit | implements a stack with push and pop | implements a queue with two stacks | performs binary search | "
        "merges two sorted lists | validates an email address | generates the Fibonacci sequence | finds all prime numbers up to n | "
        "computes the greatest common divisor | reverses the words of a sentence | flattens a nested list | rotates a list by k places | "
        "counts how often each character occurs | parses a date in the form YYYY-MM-DD | downloads a web page and prints its title | "
        "implements bubble sort | implements quicksort | implements merge sort | transposes a matrix | multiplies two matrices | "
        "solves a quadratic equation | converts a Roman numeral to an integer | converts an integer to binary | checks balanced brackets | "
        "finds the second largest number | computes the moving average of a list | groups anagrams together | implements a linked list | "
        "implements a binary tree with insertion | traverses a graph breadth first | finds the shortest path in a grid | computes a checksum | "
        "encrypts text with the Caesar cipher | rolls two dice and prints the result | simulates a bank account | makes a to-do list on the command line | "
        "implements an LRU cache | retries a function with exponential backoff | measures how long a function takes | logs messages to a file | "
        "reads JSON and prints a value | sends an HTTP GET request | writes a list of dictionaries to CSV | finds the most common element | "
        "splits a list into chunks | checks whether a year is a leap year | sums the digits of a number | capitalizes each word | "
        "replaces all spaces with underscores | counts the vowels in a string | finds the intersection of two lists | zips two lists into a dictionary | "
        "computes the distance between two points | computes compound interest | finds missing numbers in a range | shuffles a deck of cards | "
        "plays tic-tac-toe | plays hangman | guesses a number | converts seconds to hours and minutes | finds files larger than a given size | "
        "renames all files in a folder | validates a password | computes the nth triangular number | draws a triangle of stars | "
        "prints a multiplication table | finds the maximum subarray sum | computes all permutations of a string | computes all subsets of a list",
        "|",
    ),
    "task_verb": _words(
        "Write, Implement, Create, Give me, Show me, I need, Please write, Can you write"
    ),
    "column": _words(
        "id, name, price, quantity, created_at, status, email, age, city, total, category, department, salary, score, rating, country"
    ),
    "table": _words(
        "customers, orders, products, employees, students, invoices, flights, books, movies, sensors, patients, tickets, payments, reviews, courses"
    ),
    "event": _words(
        "a birthday party, a wedding, a team meeting, a job interview, a school trip, a conference, a concert, a garden sale, a charity run, "
        "a dentist appointment, a product launch, a farewell dinner, a book club, a football match, a housewarming, a parents' evening"
    ),
    "problem": _words(
        "my package arrived damaged, my order is late, I forgot my password, the app crashes at start, I was charged twice, "
        "the heating does not work, my flight was cancelled, the website is slow, I lost my receipt, the size is wrong, "
        "my neighbor is loud, I cannot sleep, my plants are dying, my phone battery drains fast, my dog barks at night, "
        "I argue with my brother, I am always late, my internet is unstable, I feel nervous before exams, my car makes a strange noise, "
        "my back hurts after work, my toddler refuses vegetables, I cannot concentrate, I spend too much money, my code has a bug I cannot find"
    ),
    "claim": _words(
        "homework should be abolished | cars should be banned from city centers | remote work is better than office work | "
        "children should learn to code | zoos should be closed | social media does more harm than good | school uniforms are useful | "
        "space exploration is worth its cost | everybody should learn a second language | voting should be mandatory | "
        "robots will take most jobs | books are better than films | cities are better places to live than villages | "
        "cash should disappear | sports are important for children | art should be free for all | a four-day week is a good idea | "
        "exams are a bad way to measure knowledge | pets make people happier | tourism harms cities",
        "|",
    ),
    "comparison": _words(
        "Python and JavaScript | a list and a tuple | TCP and UDP | cats and dogs | tea and coffee | SQL and NoSQL databases | "
        "weather and climate | renting and buying a home | electric and gasoline cars | mitosis and meiosis | a virus and a bacterium | "
        "fiction and non-fiction | a comet and an asteroid | stocks and bonds | HTTP and HTTPS | threads and processes | "
        "running and cycling | a simile and a metaphor | velocity and acceleration | recursion and iteration | frogs and toads | "
        "the Moon and Mars | supervised and unsupervised learning | a debit card and a credit card | a crocodile and an alligator | "
        "the brain and a computer | a novel and a short story | a stack and a queue | interest and inflation | a lake and a sea | "
        "butter and margarine | a symphony and a concerto | empathy and sympathy | mass and weight | Git and GitHub | UTF-8 and ASCII",
        "|",
    ),
    "role": _words(
        "a pirate captain, a kind teacher, a wise old wizard, a travel guide, a detective, a robot from the future, a sports commentator, "
        "a medieval knight, a chef in a famous restaurant, a science museum guide, a stand-up comedian, a career coach, a personal trainer, "
        "a historian, a doctor, a tough interviewer, a poet, a talking cat, a ship's engineer, a football coach, a librarian, an astronaut, "
        "a philosopher, a news anchor, a gardener, a financial adviser, a language tutor, a queen, a software architect, a mountain guide"
    ),
    "tool": _words(
        "get_weather, search_flights, book_hotel, send_email, create_event, get_stock_price, convert_currency, set_alarm, play_music, "
        "search_products, add_to_cart, translate_text, get_directions, create_ticket, query_database, turn_on_light, transfer_money, "
        "find_restaurant, track_package, schedule_meeting, get_news, set_temperature, order_pizza, update_profile, list_files"
    ),
    "field": _words(
        "name, age, city, date, time, email, price, quantity, topic, priority, status, color, phone, address, country, title, author, amount, currency, rating"
    ),
    "object": _words(
        "recipe, person, book, movie, car, invoice, event, weather report, product, student, flight, playlist, customer, job posting, house, animal, planet, exercise"
    ),
    "form": _words(
        "poem, haiku, limerick, short story, song, letter, diary entry, monologue, dialogue, fairy tale, news report, riddle, speech, advertisement"
    ),
    "list_size": _words("3, 4, 5, 5, 6, 7, 8, 10, 10"),
    "length": _words(
        "in one sentence, in two sentences, in three sentences, briefly, in detail, step by step, in simple words, in about 100 words, in one paragraph, with an example"
    ),
    "sentence": _words(
        "{name} moved from {city} to {city} in {month} to work as a {job}. | The {animal} slept under the {thing} until the rain stopped. | "
        "{company} sold {n3} {item} last year, {pct}% more than the year before. | On {weekday}, {name} {surname} met the {job} at {place}. | "
        "The meeting was moved to {weekday} at {hour}:30 because {name} was ill. | Many people in {country} believe that {claim}. | "
        "{name} bought {product} for {n2} dollars and returned it after {n1} days. | Scientists in {city} study {topic} with new methods. | "
        "The {adjective} {thing} had belonged to a {job} from {city}. | Our team will present {product} at {event} in {month}. | "
        "In {year}, {company} opened an office in {city} with {n2} employees. | {name} felt {emotion} when the {vehicle} finally arrived. | "
        "The report says that {topic} will matter more in the next {n1} years. | Please send the {item} to {name} {surname}, {city}, before {month} {n2}. | "
        "I have a question about {product}: {problem}. | {name} teaches {topic} to {audience}, and enjoys {skill} on weekends. | "
        "The price of {item} rose from {n1} to {n2} dollars within {n1} weeks. | The {job} said that {skill} takes patience. | "
        "Without {topic}, the world would look very different today. | The {vehicle} from {city} to {city} takes {n1} hours and costs {n2} euros.",
        "|",
    ),
}
"""A pool's entries may themselves have slots. `{n1}`, `{n2}`, `{n3}`, `{pct}`, `{hour}` and `{year}`
are numbers; `{snippet}`, `{signature}`, `{passage}`, `{schema}` and `{ddl}` are composed (prompts.py)."""
